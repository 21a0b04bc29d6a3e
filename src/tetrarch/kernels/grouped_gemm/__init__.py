# SPDX-License-Identifier: Apache-2.0
"""One GEMM per expert over rows sorted by expert."""
