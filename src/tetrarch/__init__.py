# SPDX-License-Identifier: Apache-2.0
"""tetrarch: serve mixture-of-experts language models whose experts are NVFP4."""
