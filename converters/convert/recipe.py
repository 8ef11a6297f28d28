"""What becomes of each matrix: one packing for all, and rules for those that differ.

A recipe is a list of rules in a JSON file (the list itself, or under "rules") or a TOML file
(`[[rules]]`). Each has a glob of tensor names and says what becomes of them:

    [{"match": "*.down_proj", "bits": 6, "group_size": 64},
     {"match": "model.layers.0.*", "mode": "mxfp8"},
     {"match": "lm_head", "keep": true},
     {"match": "model.embed_tokens", "dense": true}]

The first rule that matches a matrix decides. Names are those that the family has, with or without
`.weight`; `*` matches dots too. The rules are plain enough to be checked by hand, which words their
errors better than a schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from funcrt.errors import InputError
from funcrt.packing import AFFINE_BITS, GROUP_SIZES, MICROSCALED, Quantization

Target = Quantization | Literal["keep", "dense"]
"""A packing; or as it is stored; or expanded."""

MODES = ("affine", *MICROSCALED)
_KEYS = {"match", "bits", "group_size", "mode", "keep", "dense"}


def make_quantization(
    bits: int | None = None, group_size: int | None = None, mode: str = "affine"
) -> Quantization:
    """A packing that MLX has; None takes the usual one (affine: 4 bits in groups of 64).

    Raises InputError for others.
    """
    if mode not in MODES:
        raise InputError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    usual = MICROSCALED.get(mode, Quantization(4, 64))
    chosen = Quantization(
        usual.bits if bits is None else bits,
        usual.group_size if group_size is None else group_size,
        mode,
    )
    choices: tuple[tuple[int, ...], ...] = (AFFINE_BITS, GROUP_SIZES)
    if mode in MICROSCALED:
        choices = ((usual.bits,), (usual.group_size,))
    for name, value, allowed in zip(("bits", "group_size"), chosen, choices, strict=False):
        if value not in allowed or isinstance(value, bool):
            listed = ", ".join(map(str, allowed))
            raise InputError(f"{name}: {mode} packs with {listed}, got {value!r}")
    return chosen


@dataclass(frozen=True)
class Rule:
    """What becomes of the tensors whose names match a glob."""

    match: str
    target: Target

    def matches(self, name: str) -> bool:
        """Whether it speaks of a matrix (its name without `.weight`)."""
        return fnmatchcase(name, self.match) or fnmatchcase(f"{name}.weight", self.match)


@dataclass(frozen=True)
class Recipe:
    """Rules in order, and what becomes of the matrices that none of them matches."""

    rules: tuple[Rule, ...] = ()
    otherwise: Target = "keep"

    def rule_for(self, name: str) -> Rule | None:
        """The first rule that matches."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def check(self, names: Iterable[str]) -> None:
        """Raise InputError naming rules that decide about none of these matrices."""
        listed = list(names)
        used = {self.rule_for(name) for name in listed}
        for number, rule in enumerate(self.rules, 1):
            if rule in used:
                continue
            if any(rule.matches(name) for name in listed):
                raise InputError(
                    f"rule {number} of the recipe ({rule.match!r}) decides nothing: earlier rules "
                    "match all that it matches; move it up or leave it out"
                )
            raise InputError(
                f"rule {number} of the recipe matches no matrix: {rule.match!r}; "
                f"matrices are called {', '.join(_examples(listed))}"
            )


def load_rules(path: Path) -> tuple[Rule, ...]:
    """The rules of a JSON or TOML file. Raises InputError."""
    data = _load(path)
    rules = data.get("rules") if isinstance(data, dict) else data
    if not isinstance(rules, list) or (isinstance(data, dict) and len(data) > 1):
        raise InputError(f"{path}: expected a list of rules, alone or under 'rules'")
    return tuple(_rule(f"{path}: rule {number}", rule) for number, rule in enumerate(rules, 1))


def _load(path: Path) -> Any:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the recipe {path}: {error}") from None
    if path.suffix != ".toml":
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"the recipe {path} is not JSON: {error}") from None
    try:
        import tomllib
    except ModuleNotFoundError:
        raise InputError(f"{path}: TOML needs Python 3.11; write the recipe as JSON") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"the recipe {path} is not TOML: {error}") from None


def _rule(where: str, rule: Any) -> Rule:
    if not isinstance(rule, Mapping) or not isinstance(rule.get("match"), str):
        raise InputError(f"{where}: expected an object with 'match', a glob of names, got {rule!r}")
    if unknown := sorted(rule.keys() - _KEYS):
        known = ", ".join(sorted(_KEYS))
        raise InputError(f"{where}: unknown key {unknown[0]!r}; known: {known}")
    kinds = [key for key in ("keep", "dense") if key in rule]
    packs = {key: rule[key] for key in ("bits", "group_size", "mode") if key in rule}
    if len(kinds) + bool(packs) != 1 or any(rule[key] is not True for key in kinds):
        raise InputError(
            f"{where}: expected one of: bits, group_size, mode; or keep = true; or dense = true"
        )
    if "keep" in kinds:
        return Rule(rule["match"], "keep")
    if "dense" in kinds:
        return Rule(rule["match"], "dense")
    try:
        return Rule(rule["match"], make_quantization(**packs))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _examples(names: list[str]) -> list[str]:
    return sorted(names)[:1] + sorted(names)[-2:]
