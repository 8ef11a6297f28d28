"""Where the tensors of an adapter belong in a model."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from converters import mlx_names, multimodal
from converters.checkpoint import published_names
from funcrt.errors import ParamsError
from funcrt.layers import Part
from funcrt.layers.moe import Experts
from funcrt.model import Model
from funcrt.models import FAMILIES
from funcrt.params import Params

import mlx.core as mx

_LAYER = re.compile(r"(?:^|\.)(\d+)\.")


@dataclass(frozen=True)
class Places:
    """The matrices of a model, as adapters name them.

    Args:
        model: the base.
    """

    model: Model

    @property
    def is_module(self) -> bool:
        """Whether the model is one of mlx-lm's modules, with its names."""
        return self.model.config.model_type not in FAMILIES or (
            self.model.family is not FAMILIES[self.model.config.model_type]
        )

    def name(self, tensor: str) -> str:
        """The model's name of a tensor, which it may or may not have."""
        if tensor in self.model.spec:
            return tensor
        config, one = self.model.config, {multimodal.text_name(tensor): mx.array(0)}
        if not self.is_module:
            one = mlx_names.rename(config, published_names(config, one))
        return next(iter(one))

    def names(self, tensors: Params) -> Params:
        """Whole tensors under the model's names, in its layout."""
        config = self.model.config
        params = {multimodal.text_name(name): array for name, array in tensors.items()}
        if self.is_module:
            return params
        return mlx_names.restore(config, published_names(config, params))

    def matrix(self, module: str) -> str:
        """The model's name, without `.weight`, of what a module's matrix is called elsewhere."""
        return self.name(f"{module}.weight").removesuffix(".weight")

    def experts(self) -> list[Experts]:
        """The parts of the model whose matrices are those of experts."""
        if self.is_module:
            return []
        parts: Iterable[Part] = (
            FAMILIES[self.model.config.model_type].network(self.model.config).walk()
        )
        return [part for part in parts if isinstance(part, Experts)]

    def is_tied(self, matrix: str) -> bool:
        """Whether a matrix is both the embedding and the last projection."""
        if self.is_module or not self.model.config.tie_word_embeddings:
            return False
        network = FAMILIES[self.model.config.model_type].network(self.model.config)
        return matrix == network.tied_to

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
        for tensor in self.model.spec:
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


def rest(tensors: Mapping[str, mx.array], used: Collection[str], most: int = 8) -> str:
    """The names that were not used, for an error; empty if all were."""
    left = sorted(set(tensors) - set(used))
    more = f" and {len(left) - most} more" if len(left) > most else ""
    return ", ".join(left[:most]) + more


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
