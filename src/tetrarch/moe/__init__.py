# SPDX-License-Identifier: Apache-2.0
"""The expert layer that replaces `experts` in a Hugging Face model."""
