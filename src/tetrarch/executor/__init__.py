# SPDX-License-Identifier: Apache-2.0
"""One rank, one step."""
