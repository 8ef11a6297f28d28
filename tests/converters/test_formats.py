"""docs/formats.md says what is true now."""

from __future__ import annotations

import tests.mlx_lm_extra  # noqa: F401  (skips without mlx-lm)
from converters import formats
from converters.gguf.architectures import ARCHITECTURES
from funcrt.models import FAMILIES
from tests.converters.test_mlx_published import CASES, model_type_of


def test_the_page_is_as_committed() -> None:
    assert formats.PAGE.read_text("utf-8") == formats.page(), "run python -m converters.formats"


def test_every_family_has_a_row() -> None:
    rows = {row.model_type: row for row in formats.rows()}
    assert list(rows) == sorted(FAMILIES)
    assert rows["mixtral"].gguf == rows["mistral"].gguf == ("llama",)
    published = {name for name, row in rows.items() if row.mlx}
    assert published == {"llama", *map(model_type_of, CASES)}  # what is tested, and what is not
    assert "ernie4_5_moe" not in published
    assert {name for row in rows.values() for name in row.gguf} <= set(ARCHITECTURES)
