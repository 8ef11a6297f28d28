"""Cache states on disk: whose they are, and what a damaged file says."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from funcrt import cache, storage
from funcrt.cache import CacheState
from funcrt.errors import CacheError, SourceError
from funcrt.model import Model
from tests.cache_kinds import CACHES, empty, feed, fresh, model_of
from tests.helpers import assert_same, make_model, make_params, random_tokens

import mlx.core as mx
import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
TEXTS = [random_tokens(15, 1), random_tokens(5, 2), []]
QUESTION, OTHER = random_tokens(4, 3), random_tokens(3, 4)


def filled(kind: str) -> CacheState:
    return feed(model_of(kind), empty(kind), *TEXTS)[1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A saved state of the full kind; its name has no known ending."""
    path = tmp_path / "prefix é.cache"
    cache.save(path, filled("full"), model_of("full"), TEXTS)
    return path


@pytest.mark.parametrize("kind", CACHES)
def test_a_loaded_prefix_serves_two_questions(kind: str, tmp_path: Path) -> None:
    model, path = model_of(kind), tmp_path / "prefix.safetensors"
    state = filled(kind)
    cache.save(path, state, model, TEXTS)
    loaded = cache.load(path, model, [text + QUESTION for text in TEXTS])
    assert_same(loaded, state)
    path.unlink()  # a loaded state does not need its file
    _, state = feed(model, loaded, QUESTION, QUESTION, QUESTION)
    state = cache.trim(state, len(QUESTION))
    logits, _ = feed(model, state, OTHER, OTHER, OTHER)
    expected, _ = feed(model, filled(kind), OTHER, OTHER, OTHER)
    for ours, theirs in zip(logits, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    whole = fresh(kind, *[text + OTHER for text in TEXTS])
    for ours, theirs in zip(logits, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs[-len(OTHER) :])  # the same shapes


def test_the_text_that_a_file_belongs_to(file: Path) -> None:
    model = model_of("full")
    assert cache.load_tokens(file) == TEXTS
    cache.load(file, model)
    cache.load(file, model, TEXTS)
    cache.load(file, model, [mx.array(TEXTS[0] + [1]), tuple(TEXTS[1]), [5]])
    changed = [[*TEXTS[0][:-1], (TEXTS[0][-1] + 1) % 96], *TEXTS[1:]]
    for texts, words in [
        (changed, "row 0 has seen another text"),
        ([TEXTS[0], TEXTS[1][:-1], []], "row 1 has seen another text"),
        ([TEXTS[1], TEXTS[0], []], "row 0 has seen another text"),
        (TEXTS[:2], "has 3 rows, 2 texts are given"),
    ]:
        with pytest.raises(CacheError, match=words):
            cache.load(file, model, texts)


@pytest.mark.parametrize("texts", [TEXTS[:2], [*TEXTS, []], [TEXTS[0], TEXTS[1], [1]]])
def test_save_refuses_texts_that_do_not_fit(texts: list[list[int]], tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"do not belong to a state of lengths \[15, 5, 0\]"):
        cache.save(tmp_path / "x", filled("full"), model_of("full"), texts)
    assert list(tmp_path.iterdir()) == []


def test_save_refuses_states_and_owners_that_do_not_fit(tmp_path: Path) -> None:
    class Nameless:
        fingerprint = ""
        check_cache = model_of("full").check_cache

    with pytest.raises(CacheError, match="cache of another model"):
        cache.save(tmp_path / "x", filled("full"), model_of("window"), TEXTS)
    with pytest.raises(CacheError, match="has no fingerprint"):
        cache.save(tmp_path / "x", filled("full"), Nameless(), TEXTS)
    assert list(tmp_path.iterdir()) == []


# --- the model that a file belongs to ------------------------------------------------------------


def fine_tune(name: str, row: int, column: int) -> Model:
    """The full model with one value changed in its last bit."""
    params = make_params(model_of("full").config)
    array = np.array(params[name])
    cell = array.reshape(-1, array.shape[-1])[row : row + 1, column]
    cell[:] = np.nextafter(cell, np.float32(9))
    return Model(model_of("full").config, {**params, name: mx.array(array)})


@pytest.mark.parametrize(
    "other",
    [
        lambda: make_model(seed=1),
        lambda: fine_tune("model.embed_tokens.weight", 91, 33),
        lambda: fine_tune("model.layers.1.mlp.down_proj.weight", 5, 7),
        lambda: fine_tune("model.norm.weight", 0, 63),
        lambda: Model(replace(model_of("full").config, norm_eps=1e-6), model_of("full").params),
        lambda: make_model(num_layers=3),
    ],
    ids=["other weights", "an embedding", "a matrix", "a norm", "a config", "a layer more"],
)
def test_another_model_is_refused(other: Callable[[], Model], file: Path) -> None:
    with pytest.raises(CacheError, match="saved with another model"):
        cache.load(file, other())


def test_the_same_model_again_is_the_same(file: Path, tmp_path: Path) -> None:
    from funcrt.model import load_model

    cache.load(file, make_model())
    model_of("full").save(tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert_same(cache.load(file, again, TEXTS), filled("full"))


def test_other_layouts_of_the_same_model(tmp_path: Path) -> None:
    """A model takes any of its layouts; a bundle, which has one, refuses the others."""
    model = model_of("ring")
    state = model.init_cache(1, 48)  # the same model without rings
    cache.save(tmp_path / "x", state, model, [[]])
    assert_same(cache.load(tmp_path / "x", model), state)

    class OnlyRings:
        fingerprint = model.fingerprint

        def check_cache(self, state: CacheState) -> CacheState:
            return cache.check_state(model.cache_spec(cache.CacheLayout(max_tokens=5)), state)

    with pytest.raises(CacheError, match="cache of another model or layout"):
        cache.load(tmp_path / "x", OnlyRings())


# --- damage --------------------------------------------------------------------------------------


def test_a_file_cut_short_anywhere_is_refused(file: Path) -> None:
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    sizes = [*range(16), *range(16, header, 29), *range(header - 2, header + 3)]
    sizes += [*range(header, len(content), len(content) // 40), len(content) - 1]
    for size in sizes:
        file.write_bytes(content[:size])
        with pytest.raises(SourceError, match=r"prefix é\.cache"):
            cache.load(file, model_of("full"))


def test_bits_that_flip_are_noticed(file: Path) -> None:
    content = file.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    rng = random.Random(0)
    places = [rng.randrange(header) for _ in range(250)]
    for place in [*places, *(rng.randrange(header, len(content)) for _ in range(40))]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        if damaged[place] == content[place] or json_blank(damaged, content, place):
            continue
        file.write_bytes(damaged)
        with pytest.raises((SourceError, CacheError)):
            cache.load(file, model_of("full"))


def json_blank(damaged: bytearray, content: bytes, place: int) -> bool:
    """Padding at the end of the header may become other white space."""
    return content[place] == 32 and damaged[place] in b"\t\n\r "


def rewrite(file: Path, change: Callable[[CacheState, dict[str, str]], None]) -> None:
    """The same file with other contents, as somebody who means it would write it."""
    arrays, metadata = storage.load_arrays(file), storage.load_metadata(file)
    mx.eval(arrays)
    change(arrays, metadata)
    scratch = file.with_name("changed.safetensors")  # MLX insists on the ending
    storage.save_arrays(scratch, arrays, metadata)
    scratch.replace(file)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda a, m: a.update(lengths=a["lengths"] + 1), SourceError, "sha256 does not match"),
        (lambda a, m: m.update(tokens="[[1], [2], []]"), SourceError, "sha256 does not match"),
        (lambda a, m: m.update(tokens="[[1.5]]"), SourceError, "list of tokens is damaged"),
        (lambda a, m: m.update(tokens='{"a": 1}'), SourceError, "list of tokens is damaged"),
        (lambda a, m: m.update(tokens="[1, 2]"), SourceError, "list of tokens is damaged"),
        (lambda a, m: m.update(tokens="[" * 99999), SourceError, "list of tokens is damaged"),
        (lambda a, m: m.update(format="funcrt-cache-2"), SourceError, "not a cache file"),
        (lambda a, m: m.pop("sha256"), SourceError, "not a cache file"),
        (lambda a, m: m.clear(), SourceError, "not a cache file"),
        (lambda a, m: a.pop("layers.0.keys"), CacheError, "no layers.0.keys"),
        (lambda a, m: a.update(more=a["lengths"]), CacheError, "unknown arrays more"),
    ],
)
def test_other_contents_are_refused(
    file: Path, change: Callable[[Any, Any], None], error: type[Exception], words: str
) -> None:
    rewrite(file, change)
    with pytest.raises(error, match=words):
        cache.load(file, model_of("full"))


def test_lengths_that_do_not_fit_the_tokens(file: Path) -> None:
    """Even behind a hash that is right."""
    from funcrt.cache import files

    def shorten(arrays: CacheState, metadata: dict[str, str]) -> None:
        arrays["lengths"] = mx.array([14, 5, 0])
        metadata["sha256"] = files._digest(model_of("full").check_cache(arrays), metadata)

    rewrite(file, shorten)
    with pytest.raises(CacheError, match=r"rows of \[15, 5, 0\] tokens .* lengths \[14, 5, 0\]"):
        cache.load(file, model_of("full"))


def test_files_that_are_no_cache(tmp_path: Path) -> None:
    model = model_of("full")
    (tmp_path / "text").write_text(json.dumps({"a": 1}))
    storage.save_arrays(tmp_path / "weights.safetensors", model.params)
    for name, words in [
        ("text", "safetensors"),
        ("weights.safetensors", "not a cache file of format funcrt-cache-1"),
        ("absent", "does not exist"),
        (".", "not a readable"),
    ]:
        with pytest.raises(SourceError, match=words):
            cache.load(tmp_path / name, model)
        with pytest.raises(SourceError, match=words):
            cache.load_tokens(tmp_path / name)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "absent" / "x", tmp_path / "folder"):
        with pytest.raises(SourceError, match="cannot write"):
            cache.save(target, filled("full"), model_of("full"), TEXTS)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_new_file_takes_the_place_of_the_old(file: Path) -> None:
    """It is not written over: whoever has the old one open keeps it."""
    before, second = file.read_bytes(), file.with_name("second")
    os.link(file, second)
    model = model_of("full")
    cache.save(file, feed(model, filled("full"), [1], [2], [3])[1], model,
               [[*text, n] for n, text in enumerate(TEXTS, 1)])  # fmt: skip
    assert second.read_bytes() == before
    assert cache.load(file, model)["lengths"].tolist() == [16, 6, 1]


FULL_DISK = """
import resource, sys
from tests.test_cache_files import TEXTS, cache, filled, model_of
state = filled("full")
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
cache.save(sys.argv[1], state, model_of("full"), TEXTS)
"""


def test_a_full_disk_leaves_the_old_file(file: Path) -> None:
    before = file.read_bytes()
    assert len(before) > 40_000
    run = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(file)],
        capture_output=True, text=True, check=False, cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 1
    assert "SourceError: cannot write" in run.stderr
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == [file.name]
