# SPDX-License-Identifier: Apache-2.0
"""Functions of one element; torch's own are the definition, `uniform.py` fixes bits."""
