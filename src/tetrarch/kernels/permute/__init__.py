# SPDX-License-Identifier: Apache-2.0
"""Sort routed rows by expert, and sum them back per token."""
