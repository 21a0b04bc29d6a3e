# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several rooms share."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The demo checkpoint that ships with the package."""
    return Path(str(resources.files("tetrarch") / "demo_model"))


@pytest.fixture(scope="session")
def golden() -> Path:
    """Vectors computed by other projects' code; provenance in golden/README.md."""
    return Path(__file__).parent / "golden"
