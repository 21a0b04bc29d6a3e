# SPDX-License-Identifier: Apache-2.0
"""Many requests, in order."""
