# SPDX-License-Identifier: Apache-2.0
"""Compute the experts; the file name is the word in the support table."""
