# SPDX-License-Identifier: Apache-2.0
"""Attention over pages; `reference.py` defines it."""
