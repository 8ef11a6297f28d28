"""Mamba-2 (arXiv:2405.21060): no attention, a state space with one decay for each head."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from funcrt import ops
from funcrt.cache import CacheLayout, CacheSpec
from funcrt.cache.layout import CacheEntry
from funcrt.config import ModelConfig, RopeConfig, setting
from funcrt.errors import ConfigError
from funcrt.layers import Embedding, Linear, Network, Part, RMSNorm, Run
from funcrt.layers.conv import ShortConv
from funcrt.ops.scans import ssd
from funcrt.params import ParamSpec

import mlx.core as mx

_ABSENT = ("attention_bias", "mlp_bias", "rope_theta", "rope_scaling")


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """A Mamba-2. Its heads are those of the state space, its kv heads groups that share b and c.

    `time_step_limit` bounds the steps from below and, with a second number, from above.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128,
        "layer_norm_epsilon": 1e-5, "eos_token_id": 2,
    }  # fmt: skip
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "rms_norm": (None, True),
        "rope_parameters": (None,),
        "rope_scaling": (None,),
    }
    HARMLESS: ClassVar[frozenset[str]] = frozenset({
        "chunk_size", "d_intermediate", "fused_add_norm", "norm_before_gate",
        "rescale_prenorm_residual", "time_step_floor", "time_step_init_scheme", "time_step_max",
        "time_step_min", "time_step_rank", "time_step_scale",
    })  # fmt: skip

    num_heads: int = setting("num_heads")
    num_kv_heads: int = setting("n_groups")
    norm_eps: float = setting("layer_norm_epsilon")
    rope: RopeConfig = field(default_factory=RopeConfig)  # nothing turns
    expand: int = setting("expand", 2)
    state_size: int = setting("state_size")
    conv_kernel: int = setting("conv_kernel", 4, least=2)
    use_bias: bool = setting("use_bias", False)
    use_conv_bias: bool = setting("use_conv_bias", True)
    residual_in_fp32: bool = setting("residual_in_fp32", True)
    time_step_limit: tuple[float, ...] = setting("time_step_limit", (0.0,))

    def __post_init__(self) -> None:
        super().__post_init__()
        width = self.num_heads * self.head_dim
        if not self.hidden_size * self.expand == self.intermediate_size == width:
            raise ConfigError(
                f"hidden_size * expand ({self.hidden_size} * {self.expand}), intermediate_size "
                f"({self.intermediate_size}) and num_heads * head_dim ({self.num_heads} * "
                f"{self.head_dim}) must be the same"
            )
        limit = self.time_step_limit
        if len(limit) not in (1, 2) or not 0 <= limit[0] <= limit[-1]:
            raise ConfigError(
                f"config time_step_limit: expected [least, most], at least 0, got {list(limit)}"
            )

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        hf = super().fill(hf)
        if hf.get("intermediate_size") is None and hf.get("hidden_size") is not None:
            hf["intermediate_size"] = hf["hidden_size"] * (hf.get("expand") or 2)
        limit = hf.get("time_step_limit")
        if limit is None:
            hf.pop("time_step_limit", None)
        elif len(limit) == 2 and limit[1] in (float("inf"), {"__float__": "Infinity"}):
            hf["time_step_limit"] = [limit[0]]  # no bound; configs of ours hold finite numbers
        return hf

    @classmethod
    def ropes(cls, hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        return {}

    def to_hf(self) -> dict[str, Any]:
        hf = {key: value for key, value in super().to_hf().items() if key not in _ABSENT}
        low, high = (*self.time_step_limit, float("inf"))[:2]
        return {**hf, "time_step_limit": [low, high], "time_step_rank": "auto"}


def network(config: Config) -> Network:
    """The layers of one config."""
    e, v, eps = config.hidden_size, config.vocab_size, config.norm_eps
    return Network(
        embed=Embedding("backbone.embeddings", v, e),
        layers=tuple(
            Block(
                norm=RMSNorm(f"backbone.layers.{i}.norm", e, eps),
                mixer=mixer(config, i),
                wide=config.residual_in_fp32,
            )
            for i in range(config.num_layers)
        ),
        norm=LastNorm("backbone.norm_f", e, eps),
        head=None if config.tie_word_embeddings else Linear("lm_head", e, v),
        tied_to="backbone.embeddings",
    )


def mixer(config: Config, i: int) -> Mixer:
    """The state space of one layer."""
    name, e, inner = f"backbone.layers.{i}.mixer", config.hidden_size, config.intermediate_size
    conv = inner + 2 * config.num_kv_heads * config.state_size
    return Mixer(
        name=name,
        layer=i,
        heads=config.num_heads,
        head_dim=config.head_dim,
        groups=config.num_kv_heads,
        state_size=config.state_size,
        act=config.hidden_act,
        eps=config.norm_eps,
        limit=config.time_step_limit,
        in_proj=Linear(f"{name}.in_proj", e, inner + conv + config.num_heads, config.use_bias),
        conv=ShortConv(f"{name}.conv1d", i, conv, config.conv_kernel, config.use_conv_bias),
        out_proj=Linear(f"{name}.out_proj", inner, e, config.use_bias),
    )


@dataclass(frozen=True, kw_only=True)
class Mixer(Part):
    """The block of §7: all projections at once, a convolution, the state space, a gated norm.

    Attributes:
        name: of its tensors.
        layer: number of the layer, which names its cache.
        heads: H.
        head_dim: D.
        groups: G, of neighbouring heads that share b and c, and within which the norm is taken.
        state_size: N.
        act: activation after the convolution.
        eps: of the norm.
        limit: see `Config`.
        in_proj: to the gate `H D`, what is convolved (x `H D`, b and c `G N` each), steps `H`.
        conv: of x, b and c.
        out_proj: `[B, T, H D]` -> `[B, T, E]`.
    """

    name: str
    layer: int
    heads: int
    head_dim: int
    groups: int
    state_size: int
    act: str
    eps: float
    limit: tuple[float, ...]
    in_proj: Part
    conv: ShortConv
    out_proj: Part

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        inner, shared = self.heads * self.head_dim, self.groups * self.state_size
        gate, xbc, steps = mx.split(
            self.in_proj(run, x), [inner, inner + self.conv.channels], axis=-1
        )
        xbc = ops.ACTIVATIONS[self.act](self.conv(run, xbc))
        x, b, c = mx.split(xbc, [inner, inner + shared], axis=-1)
        x = x.reshape(*x.shape[:2], self.heads, self.head_dim)
        b, c = (a.reshape(*a.shape[:2], self.groups, self.state_size) for a in (b, c))
        kept = f"layers.{self.layer}.state"
        y, state = ssd(
            x,
            step=run.zero_padding(self._bound(steps + self._vector(run, "dt_bias"))),
            decay=-mx.exp(self._vector(run, "A_log")),
            b=b,
            c=c,
            state=run.attend.state[kept],
        )
        run.attend.replace(kept, state)
        y = y + x * self._vector(run, "D")[:, None]
        return self.out_proj(run, self._norm(run, y.reshape(gate.shape), gate).astype(run.dtype))

    def _vector(self, run: Run, part: str) -> mx.array:
        return run.params[f"{self.name}.{part}"].astype(mx.float32)

    def _bound(self, x: mx.array) -> mx.array:
        """Steps from what the projection gives for them."""
        step, (low, *high) = mx.logaddexp(x, 0), self.limit
        step = step if low == 0 else mx.maximum(step, low)
        return mx.minimum(step, high[0]) if high else step

    def _norm(self, run: Run, y: mx.array, gate: mx.array) -> mx.array:
        """Gated, then RMS norm within each group, in float32: `[B, T, H D]`."""
        y = y * ops.ACTIVATIONS["silu"](gate.astype(mx.float32))
        grouped = y.reshape(*y.shape[:2], self.groups, -1)
        y = mx.fast.rms_norm(grouped, None, self.eps).reshape(y.shape)
        return y * self._vector(run, "norm.weight")

    def tensors(self) -> ParamSpec:
        heads = (self.heads,)
        vectors = {f"{self.name}.{part}": heads for part in ("dt_bias", "A_log", "D")}
        return {**vectors, f"{self.name}.norm.weight": (self.heads * self.head_dim,)}

    def entries(self, dtype: str, layout: CacheLayout) -> CacheSpec:
        shape = ("B", self.heads, self.head_dim, self.state_size)
        return (CacheEntry(f"layers.{self.layer}.state", shape, "float32"),)


@dataclass(frozen=True, kw_only=True)
class Block(Part):
    """Norm, then mixer, added in float32 if `wide`."""

    norm: Part
    mixer: Part
    wide: bool

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        y = self.mixer(run, self.norm(run, x.astype(run.dtype)))
        return y + (x.astype(mx.float32) if self.wide else x)


@dataclass(frozen=True)
class LastNorm(RMSNorm):
    """RMS norm that brings what was added in float32 back to the compute dtype."""

    def __call__(self, run: Run, x: mx.array) -> mx.array:
        return super().__call__(run, x).astype(run.dtype)
