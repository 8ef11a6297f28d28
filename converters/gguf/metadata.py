"""The metadata of one model, which remembers what was asked for."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from pathlib import Path
from typing import Any

from converters.gguf.file import GGUFFile, GGUFTensor
from funcrt.errors import ConfigError, ParamsError

# They describe files and tools, or repeat what tensors show.
_HARMLESS = frozenset({
    "attention.causal", "rope.scaling.finetuned", "tensor_data_layout", "vocab_size",
})  # fmt: skip


class Metadata:
    """The keys that start with the name of the architecture, and the tensors they describe.

    Args:
        file: the header.
        architecture: value of `general.architecture`.
        ignore: keys known not to matter, in full.
    """

    def __init__(self, file: GGUFFile, architecture: str, ignore: Collection[str] = ()) -> None:
        start = f"{architecture}."
        self.path: Path = file.path
        self.tensors: dict[str, GGUFTensor] = file.tensors
        self._start = start
        self._values = {
            key.removeprefix(start): value
            for key, value in file.metadata.items()
            if key.startswith(start) and key not in ignore and key.removeprefix(start) not in ignore
        }
        self._asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value of any type."""
        self._asked.add(key)
        return self._values.get(key, default)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer, also one that is written once for each layer. Raises ConfigError."""
        value = self.get(key, default)
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.unusable(key, "a positive integer", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number. Raises ConfigError."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < inf:
            raise self.unusable(key, "a positive number", value)
        return float(value)

    def flags(self, key: str, count: int) -> list[bool] | int | None:
        """A pattern of layers: a flag for each of `count`, or a period; None if there is none."""
        value = self.get(key)
        if value is None or (isinstance(value, int) and value > 0):
            return value
        if isinstance(value, list) and len(value) >= count and {*value} <= {True, False}:
            return [bool(flag) for flag in value[:count]]
        raise self.unusable(key, f"a period, or {count} flags", value)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this name."""
        return name in self.tensors

    def rows(self, name: str) -> int | None:
        """The first number of a tensor's shape; None without it."""
        return self.tensors[name].shape[0] if name in self.tensors else None

    def unusable(self, key: str, expected: str, value: Any) -> ConfigError:
        """The error for a value that cannot be used."""
        got = (
            "differing values"
            if isinstance(value, list)
            else "nothing"
            if value is None
            else repr(value)
        )
        return ConfigError(
            f"{self.path}: metadata {self._start}{key}: expected {expected}, got {got}"
        )

    def check_known(self) -> None:
        """Raise ConfigError for keys that were never asked for and may change the result."""
        if self._values.get("attention.causal") is False:
            raise self.unusable("attention.causal", "true, for a model that generates", False)
        # Zero, false and "" switch a feature off, so an unknown key holding them changes nothing.
        unknown = sorted(
            f"{self._start}{key}"
            for key, value in self._values.items()
            if value and key not in self._asked and key not in _HARMLESS
        )
        if unknown:
            raise ConfigError(
                f"{self.path}: metadata keys that may change the result are unknown: "
                f"{', '.join(unknown)}; if they do not matter here, name them in `ignore`"
            )

    def layers(self) -> int:
        """How many blocks there are, those that predict further ahead included.

        Raises ConfigError, and ParamsError where there are fewer tensors: configs list things by
        layer, so this comes before anything is made of the count.
        """
        count = self.count("block_count")
        if count > len(self.tensors):
            raise ParamsError(
                f"{self.path}: config has {count} layers, but only {len(self.tensors)} tensors"
            )
        return count
