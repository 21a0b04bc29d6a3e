# SPDX-License-Identifier: Apache-2.0
"""Bring tokens to their experts; the file name is the word in the support table."""
