# SPDX-License-Identifier: Apache-2.0
"""The page about HTTP is read off the routes, so it names all of them and all of their fields."""

from __future__ import annotations

from tetrarch.engine.request import SamplingParams
from tetrarch.serve.reference import markdown
from tetrarch.serve.routes import ROUTES


def test_every_route_body_field_and_sampling_key_is_on_the_page() -> None:
    page = markdown()
    for route in ROUTES:
        assert all(f"`{path}`" in page for path in route.paths)
        fields = route.body.__struct_fields__ if route.body else ()
        assert all(f"| `{name}` |" in page for name in fields)
    assert all(f"| `{name}` |" in page for name in SamplingParams.__struct_fields__)


def test_no_row_is_without_words() -> None:
    rows = [line for line in markdown().splitlines() if line.startswith(("| GET", "| POST"))]
    assert len(rows) == len(ROUTES)
    assert all(cell.strip() for row in rows for cell in (row.split("|")[4], row.split("|")[5]))
