# SPDX-License-Identifier: Apache-2.0
"""Tensors in, tensors out; one folder an operation, reference.py is its definition."""
