"""Where the tensors of an adapter belong in a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

from converters import mlx_names, multimodal
from funcrt.bundle import Bundle
from funcrt.config import ModelConfig
from funcrt.errors import ParamsError, some_of
from funcrt.layers import Part
from funcrt.layers.moe import Experts
from funcrt.model import Model
from funcrt.models import FAMILIES
from funcrt.params import Params

import mlx.core as mx

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


class Places:
    """The matrices of a model or a bundle, as adapters name them.

    Args:
        base: what is adapted.

    Attributes:
        names: of its tensors.
    """

    def __init__(self, base: Model | Bundle) -> None:
        self._base = base
        self.names = set(base.spec if isinstance(base, Model) else base.stored_shapes)

    def name(self, tensor: str) -> str:
        """The base's name of a tensor, which it may or may not have."""
        text = multimodal.text_name(tensor)
        known = (tensor, text, text.removeprefix("transformer."), *mlx_names.renamed(text))
        return next((name for name in known if self._has(name)), text)

    def _has(self, name: str) -> bool:
        # Stacks of experts are called what their matrices are, without `.weight`.
        return name in self.names or name.removesuffix(".weight") in self.names

    def matrix(self, module: str) -> str:
        """The base's name, without `.weight`, of what a module's matrix is called elsewhere."""
        return self.name(f"{module}.weight").removesuffix(".weight")

    def whole(self, tensors: Params) -> Params:
        """Tensors that mlx-lm wrote, under the base's names and in its layout."""
        config = self._family_config()
        named = {multimodal.text_name(name): array for name, array in tensors.items()}
        return named if config is None else mlx_names.restore(config, named)

    def experts(self) -> list[Experts]:
        """The parts of the base whose matrices are those of experts."""
        config = self._family_config()
        if config is None:
            return []
        parts: Iterable[Part] = FAMILIES[config.model_type].network(config).walk()
        return [part for part in parts if isinstance(part, Experts)]

    def _family_config(self) -> ModelConfig | None:
        """None for modules of mlx-lm, whose names and layouts are mlx-lm's, and for bundles."""
        if not isinstance(self._base, Model):
            return None
        config = self._base.config
        return config if self._base.family is FAMILIES.get(config.model_type) else None

    @property
    def is_tied(self) -> bool:
        """Whether the embedding is the last projection, too."""
        values = self._base.config_values
        return bool({**values, **values.get("source", {})}.get("tie_word_embeddings"))

    def check_depth(self, name: str, changes: Collection[str]) -> None:
        """Raise ParamsError if an adapter that goes up to the last layer stops before it.

        That is how an adapter for a base with fewer layers of the same widths shows itself.
        """
        last: dict[str, int] = {}
        for matrix in changes:
            if place := _LAYER.search(matrix):
                kind = matrix[: place.start(1)] + "*" + matrix[place.end(1) :]
                last[kind] = max(last.get(kind, -1), int(place[1]))
        if not last:
            return
        deepest = -1
        for tensor in self.names:
            if place := _LAYER.search(tensor):
                kind = tensor[: place.start(1)] + "*" + tensor[place.end(1) :]
                if kind in last or kind.removesuffix(".weight") in last:
                    deepest = max(deepest, int(place[1]))
        reached = max(last.values())
        if 0 <= reached < deepest:
            example = next(m for m in sorted(changes) if f".{reached}." in m)
            raise ParamsError(
                f"adapter {name} does not fit this base: it ends in layer {reached} ({example}), "
                f"and the base goes on to layer {deepest}: it was made for one with fewer layers"
            )


def rest(tensors: Mapping[str, mx.array], used: Collection[str]) -> str:
    """The names that were not used, for an error; empty if all were."""
    return some_of(sorted(set(tensors) - set(used)))


def scaled(array: mx.array, scale: float) -> mx.array:
    """In float32, so that a scale costs no precision."""
    return array.astype(mx.float32) * scale


def check_pairs(name: str, tensors: Params, a: str, b: str) -> None:
    """Raise ParamsError unless every tensor with one ending has its partner with the other."""
    missing = [
        base + other
        for tensor in tensors
        for end, other in ((a, b), (b, a))
        if tensor.endswith(end) and (base := tensor.removesuffix(end)) + other not in tensors
    ]
    if missing:
        raise ParamsError(
            f"adapter {name} is incomplete: it lacks {', '.join(sorted(missing)[:8])}"
        )
