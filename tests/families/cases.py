"""The golden cases of all families, and what the checks of one case share."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import converters
from funcrt import masks
from funcrt.cache import FULL, CacheLayout, CacheState, state_size
from funcrt.model import Model
from tests.families.results import WIDTH
from tests.helpers import run_in_pieces
from tests.reference import golden
from tests.reference.golden import Golden

import mlx.core as mx
import numpy as np

LLAMA = ("llama3-old", "yarn-mscale", "bias")  # of the twenty in tests/reference/llama
PIECES = (200, 24, 7, 150, 151, *[1] * 8)  # of a prompt of 540 tokens


def case_names() -> list[str]:
    """All golden cases, sorted."""
    return sorted([*(f"llama-{name}" for name in LLAMA), *golden.family_cases()])


def config_of(name: str) -> dict[str, Any]:
    """The config.json of a case."""
    if (llama := name.removeprefix("llama-")) in LLAMA:
        return dict(golden.CASES[llama]["config"])
    config: dict[str, Any] = json.loads((golden.family_folder(name) / "config.json").read_text())
    return config


class Case:
    """One tiny checkpoint with what transformers computes for it; everything is made once.

    Use it as a context: it holds a temporary folder.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> Case:
        self._temporary = tempfile.TemporaryDirectory(prefix="funcrt-family-")
        self.scratch = Path(self._temporary.name)
        self.folder, self.golden = self._find()
        self.hf = config_of(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def _find(self) -> tuple[Path, Golden]:
        name = self.name.removeprefix("llama-")
        if name in LLAMA:
            folder = golden.make_folder(name, self.scratch / "llama")
            return folder, golden.read_golden(name)
        return golden.family_folder(self.name), golden.read_family_golden(self.name)

    @property
    def model_type(self) -> str:
        """As config.json spells it."""
        return str(self.hf["model_type"])

    def load(self, config: Mapping[str, Any], dtype: str = "float32") -> Model:
        """The same weights under another config.json, as a user would load them."""
        folder = self.scratch / "changed"
        folder.mkdir(exist_ok=True)
        if not (folder / "model.safetensors").exists():
            shutil.copyfile(self.folder / "model.safetensors", folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        return converters.load(folder, dtype=dtype)

    @cached_property
    def model(self) -> Model:
        """The model in float32."""
        return converters.load(self.folder, dtype="float32")

    def layouts(self, max_tokens: int = WIDTH) -> list[CacheLayout]:
        """Full caches, and rings for calls of `max_tokens` where the model has windows."""
        rings = CacheLayout(max_tokens=max_tokens)
        differs = self.model.cache_spec(rings) != self.model.cache_spec(FULL)
        return [FULL, rings] if differs else [FULL]

    def tokens(self, count: int, seed: int) -> list[int]:
        """Random ids of the case's vocabulary."""
        rng = np.random.default_rng([seed, count])
        return [int(token) for token in rng.integers(1, self.model.vocab_size, count)]

    @cached_property
    def prompt(self) -> list[int]:
        """Ids of the golden prompt."""
        return [int(token) for token in np.array(self.golden.tokens)[0]]

    @cached_property
    def whole(self) -> mx.array:
        """Logits `[T, V]` of the golden prompt in one call, uncached."""
        return run_plain(self.model, self.prompt)

    def in_pieces(self) -> list[mx.array]:
        """The same in several calls (the golden file's, or `PIECES`), for each layout."""
        chunks = self.golden.chunks
        sizes = PIECES if chunks is None else [int(size) for size in np.array(chunks)]
        capacity = len(self.prompt) + 1
        return [
            run_in_pieces(
                self.model, self.golden.tokens, sizes,
                self.model.init_cache(1, capacity, max_tokens=layout.max_tokens),
            )
            for layout in self.layouts(max(sizes))
        ]  # fmt: skip


def replace_keys(hf: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A config with some values replaced; a dot in a key leads into a dict."""
    changed = dict(hf)
    for path, value in changes.items():
        key, _, rest = path.partition(".")
        changed[key] = replace_keys(changed[key], {rest: value}) if rest else value
    return changed


def run_plain(model: Model, tokens: Sequence[int], params: Any = None) -> mx.array:
    """Logits `[T, V]` of one text: eager, uncached, alone; `params` are the model's own or others.

    Within `mx.grad` it traces.
    """
    state = model.init_cache(1, len(tokens) + 1)
    ids = mx.array([list(tokens)], dtype=mx.int32)
    mask = causal(mx.ones_like(ids), state)
    logits, _ = model.forward(model.params if params is None else params, ids, mask, state)
    return logits[0]


def causal(valid: mx.array, state: CacheState) -> mx.array:
    """bool `[B, 1, T, S]` for a call on `state` where `valid` `[B, T]` is nonzero."""
    return masks.causal(valid, state["lengths"], state_size(state)[1])
