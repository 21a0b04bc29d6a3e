# SPDX-License-Identifier: Apache-2.0
"""A model from a checkpoint, and a new checkpoint into the same model."""
