"""What networks are built of: parts that know their tensors, their cache arrays and what they do.

A part is a frozen description: names and sizes, no arrays. `Network` gathers from its parts what a
family must tell (`param_spec`, `fusions`, `cache_spec`), so that a layer is described once.
"""

from __future__ import annotations

from funcrt.layers.attention import Attention
from funcrt.layers.basic import Embedding, LayerNorm, Linear, RMSNorm, Stacked
from funcrt.layers.blocks import Parallel, PostNorm, PreNorm, Sandwich
from funcrt.layers.mlp import MLP, GatedMLP
from funcrt.layers.moe import Experts, Gated, MoE, StackedExperts
from funcrt.layers.network import Network, NetworkFamily
from funcrt.layers.part import Part, Run

__all__ = [
    "MLP",
    "Attention",
    "Embedding",
    "Experts",
    "Gated",
    "GatedMLP",
    "LayerNorm",
    "Linear",
    "MoE",
    "Network",
    "NetworkFamily",
    "Parallel",
    "Part",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
    "Run",
    "Sandwich",
    "Stacked",
    "StackedExperts",
]
