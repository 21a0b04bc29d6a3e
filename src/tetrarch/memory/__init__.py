# SPDX-License-Identifier: Apache-2.0
"""Where tensors live: slots whose address never changes."""
