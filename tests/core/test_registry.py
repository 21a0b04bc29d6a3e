# SPDX-License-Identifier: Apache-2.0
"""A registry imports nothing until a name is asked for."""

from __future__ import annotations

import sys

import pytest

from tetrarch.core.registry import Registry


def test_listing_does_not_import_and_asking_does() -> None:
    registry = Registry({"colors": "colorsys:rgb_to_hsv", "absent": "no_such_module:thing"})
    sys.modules.pop("colorsys", None)
    assert list(registry) == ["colors", "absent"]
    assert len(registry) == 2
    assert "colors" in registry
    assert "other" not in registry
    assert "colorsys" not in sys.modules
    assert registry["colors"](1.0, 0.0, 0.0) == (0.0, 1.0, 1.0)
    with pytest.raises(ModuleNotFoundError):
        registry["absent"]
    with pytest.raises(KeyError):
        registry["unknown"]
