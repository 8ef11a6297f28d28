"""The committed table of every module of mlx-lm, and a sample of its rows made anew."""

from __future__ import annotations

import tests.mlx_lm_extra  # noqa: F401 (skips without mlx-lm)
from tests.reference.make_mlx_lm_modules import COLUMNS, list_modules, load_table, make_row, passed
from tests.reference.mlx_lm_bundles import check_bundle

import pytest

# One for each kind of cache and each way to call a module.
SAMPLE = {
    "llama": "KVCache and RotatingKVCache",
    "llama4": "ChunkedKVCache",
    "mamba2": "ArraysCache, padding left out by lengths",
    "recurrent_gemma": "ArraysCache, token by token",
    "falcon_h1": "CacheList",
    "afm7": "ConcatenateKVCache, keys_and_values",
    "deepseek_v32": "keys without values, chosen by an index",
    "gpt_bigcode": "positions from numpy",
}
TABLE = {row["module"]: row for row in load_table()}


def test_the_table_has_every_module() -> None:
    assert list(TABLE) == list_modules()
    for row in TABLE.values():
        assert list(row) == ["module", *COLUMNS, "reason"]
        assert passed(row) or row["reason"]


def test_most_modules_pass_everything() -> None:
    assert sum(map(passed, TABLE.values())) >= 0.92 * len(TABLE)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_as_committed(name: str) -> None:
    assert make_row(name) == TABLE[name]


@pytest.mark.parametrize("name", [*SAMPLE, "bitnet"])  # whose weights are bytes
def test_a_bundle_gives_mlx_lms_tokens(name: str) -> None:
    assert check_bundle(name) == ""
