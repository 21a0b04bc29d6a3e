# SPDX-License-Identifier: Apache-2.0
"""Quantize activations to NVFP4."""
