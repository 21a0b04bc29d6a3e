# SPDX-License-Identifier: Apache-2.0
"""Which experts a token goes to, from its router's logits."""
