# SPDX-License-Identifier: Apache-2.0
"""Dense products of rows and weights; torch's own are the definition, `tiled.py` fixes bits."""
