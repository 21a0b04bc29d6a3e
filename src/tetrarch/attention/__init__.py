# SPDX-License-Identifier: Apache-2.0
"""Paged attention, registered with the Hugging Face model."""
