# SPDX-License-Identifier: Apache-2.0
"""What was asked, what the device can do, and the plan made of both."""
