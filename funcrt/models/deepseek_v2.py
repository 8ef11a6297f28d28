"""DeepSeek-V2 (arXiv:2405.04434): attention over latents, and fine-grained experts in groups.

Beside the experts that a router chooses, every token goes through shared ones (arXiv:2401.06066);
in the first layers it goes through a plain MLP instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from funcrt.config import ModelConfig, setting
from funcrt.errors import ConfigError
from funcrt.layers import Linear, Network, Part, RMSNorm, Stacked
from funcrt.layers.basic import Float32Linear
from funcrt.layers.latent import LatentAttention, LowRank
from funcrt.layers.mlp import gated_mlp
from funcrt.layers.moe import Experts, MoE
from funcrt.models import llama
from funcrt.ops.rotary import yarn_magnitude
from funcrt.ops.routing import Route, check_groups, route_grouped_softmax, route_softmax

import mlx.core as mx

GREEDY, BY_GROUP = METHODS = ("greedy", "group_limited_greedy")
NORM_EPS = 1e-6  # of norms within attention, whatever the config says of the others


@dataclass(frozen=True, kw_only=True)
class LatentConfig(ModelConfig):
    """What models with latent attention share; `head_dim` is the part of a head that turns."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset({"qk_head_dim"})  # follows from two others

    q_lora_rank: int | None = setting("q_lora_rank", None)
    kv_lora_rank: int = setting("kv_lora_rank")
    qk_nope_head_dim: int = setting("qk_nope_head_dim")
    qk_rope_head_dim: int = setting("qk_rope_head_dim")
    v_head_dim: int = setting("v_head_dim")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_kv_heads != self.num_heads:
            raise ConfigError(
                f"num_key_value_heads ({self.num_kv_heads}): expected as many as "
                f"num_attention_heads ({self.num_heads}), since latents make keys for every head"
            )

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        return super().fill({**hf, "head_dim": hf.get("qk_rope_head_dim")})


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(ModelConfig):
    """What models with DeepSeek's mixtures of experts share.

    GROUP_BEST: how many of its best experts make the score of a group.
    """

    GROUP_BEST: ClassVar[int] = 1
    HARMLESS: ClassVar[frozenset[str]] = frozenset({
        "aux_loss_alpha", "ep_size", "output_router_logits", "router_aux_loss_coef", "seq_aux",
    })  # fmt: skip

    dense_layers: int = setting("first_k_dense_replace", least=0)
    sparse_every: int = setting("moe_layer_freq", 1)
    expert_size: int = setting("moe_intermediate_size")
    num_experts: int = setting("n_routed_experts")
    num_shared: int | None = setting("n_shared_experts", None, least=0)
    num_chosen: int = setting("num_experts_per_tok")
    num_groups: int | None = setting("n_group", None)
    kept_groups: int | None = setting("topk_group", None)
    routed_scale: float = setting("routed_scaling_factor")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_experts, self.num_chosen, *self.groups, best=self.GROUP_BEST)

    @property
    def groups(self) -> tuple[int, int]:
        """How many groups of experts there are, and from how many of them a token chooses."""
        if self.num_groups is None or self.kept_groups is None:
            raise ConfigError("config n_group, topk_group: expected whole numbers, one is missing")
        return self.num_groups, self.kept_groups

    def is_sparse(self, i: int) -> bool:
        """Whether layer `i` has experts."""
        return i >= self.dense_layers and i % self.sparse_every == 0


@dataclass(frozen=True, kw_only=True)
class Config(LatentConfig, ExpertsConfig):
    """A DeepSeek-V2."""

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "first_k_dense_replace": 0, "kv_lora_rank": 512, "moe_intermediate_size": 1407,
        "n_routed_experts": 64, "n_shared_experts": 2, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 1.0,
        "v_head_dim": 128,
    }  # fmt: skip
    # Published code and transformers differ in what it does where norm_topk_prob is true.
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **ModelConfig.FIXED, "norm_topk_prob": (None, False), "scoring_func": (None, "softmax"),
    }  # fmt: skip
    HARMLESS: ClassVar[frozenset[str]] = LatentConfig.HARMLESS | ExpertsConfig.HARMLESS
    INTERLEAVED: ClassVar[bool] = True

    topk_method: str = setting("topk_method", GREEDY)

    @property
    def groups(self) -> tuple[int, int]:
        if self.topk_method not in METHODS:
            raise ConfigError(
                f"topk_method {self.topk_method!r} is not supported; known: {', '.join(METHODS)}"
            )
        return (1, 1) if self.topk_method == GREEDY else super().groups


def network(config: Config) -> Network:
    """The layers of one config."""

    def layer(i: int) -> Part:
        mlp = mixture(config, i, rule(config)) if config.is_sparse(i) else None
        return llama.layer(config, i, attention(config, i), mlp)

    return llama.stack(config, layer)


def attention(config: LatentConfig, i: int) -> LatentAttention:
    """Attention of one layer."""
    name, e, h, bias = (
        f"model.layers.{i}.self_attn", config.hidden_size, config.num_heads, config.attention_bias
    )  # fmt: skip
    c, r, d = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim
    queries, low = h * (d + r), config.q_lora_rank
    if low is None:
        first, query = Linear(f"{name}.q_proj", e, queries), None
    else:
        first = Linear(f"{name}.q_a_proj", e, low, bias)
        norm = RMSNorm(f"{name}.q_a_layernorm", low, NORM_EPS)
        query = LowRank(norm, Linear(f"{name}.q_b_proj", low, queries))
    latents = Linear(f"{name}.kv_a_proj_with_mqa", e, c + r, bias)
    return LatentAttention(
        layer=i,
        heads=h,
        head_dim=d,
        rope_dim=r,
        value_dim=config.v_head_dim,
        rank=c,
        down=Stacked(f"{name}.qkv_a_proj", (first, latents)),
        query=query,
        latent_norm=RMSNorm(f"{name}.kv_a_layernorm", c, NORM_EPS),
        up=Linear(f"{name}.kv_b_proj", c, h * (d + config.v_head_dim)),
        out=Linear(f"{name}.o_proj", h * config.v_head_dim, e, bias),
        scale=scale(config),
        rope=config.rope,
    )


def scale(config: LatentConfig) -> float:
    """Of the scores: that of the paper, times yarn's temperature of stretched contexts, squared."""
    width, rope = config.qk_nope_head_dim + config.qk_rope_head_dim, config.rope
    stretched = yarn_magnitude(rope, rope.mscale_all_dim) if rope.mscale_all_dim else 1.0
    return stretched**2 / math.sqrt(width)


def rule(config: Config) -> Callable[[mx.array], Route]:
    """How experts are chosen."""
    count, factor, (groups, kept) = config.num_chosen, config.routed_scale, config.groups
    if config.topk_method == GREEDY:
        return partial(route_softmax, count=count, normalize=False, scale=factor)
    return partial(route_grouped_softmax, count=count, groups=groups, kept=kept, scale=factor)


def mixture(
    config: ExpertsConfig, i: int, rule: Callable[..., Route], make: Callable[..., MoE] = MoE
) -> MoE:
    """What stands in place of the MLP: a `make` of experts that are chosen by `rule`."""
    name, e, f, act = (
        f"model.layers.{i}.mlp", config.hidden_size, config.expert_size, config.hidden_act
    )  # fmt: skip
    shared = f * (config.num_shared or 0)
    return make(
        router=Float32Linear(f"{name}.gate", e, config.num_experts),
        rule=rule,
        experts=Experts(
            name=f"{name}.experts", count=config.num_experts, width=e, inner=f, act=act
        ),
        shared=gated_mlp(f"{name}.shared_experts", e, shared, act, config.mlp_bias)
        if shared
        else None,
    )
