# SPDX-License-Identifier: Apache-2.0
"""How processes talk: groups with trainers, and between ranks."""
