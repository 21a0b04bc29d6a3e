# SPDX-License-Identifier: Apache-2.0
"""Words everyone may use; imports nothing of ours."""
