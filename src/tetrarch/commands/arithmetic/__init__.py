# SPDX-License-Identifier: Apache-2.0
"""Grade-school word problems, generated: what the demo model was trained on and is tested with."""
