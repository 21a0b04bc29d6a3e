# SPDX-License-Identifier: Apache-2.0
"""What the numbers mean: contracts, NVFP4 and FP8, scale layouts."""
