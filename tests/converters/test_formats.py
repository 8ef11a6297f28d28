"""docs/formats.md says what is true now."""

from __future__ import annotations

import tests.mlx_lm_extra  # noqa: F401  (skips without mlx-lm)
from converters import formats
from funcrt.models import FAMILIES


def test_the_page_is_as_committed() -> None:
    assert formats.PAGE.read_text("utf-8") == formats.page(), "run python -m converters.formats"


def test_every_family_has_a_row() -> None:
    assert [row.model_type for row in formats.rows()] == sorted(FAMILIES)
