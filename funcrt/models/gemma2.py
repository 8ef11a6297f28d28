"""Gemma 2 (arXiv:2408.00118): windows in every other layer, soft caps, norms before and after.

A window shows q - k < W.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from funcrt.config import setting
from funcrt.config.patterns import PatternConfig
from funcrt.errors import ConfigError
from funcrt.layers import Attention, Network, Part, Sandwich
from funcrt.layers.mlp import gated_mlp
from funcrt.models import gemma, llama


@dataclass(frozen=True, kw_only=True)
class Config(PatternConfig):
    """A Gemma 2.

    Attributes:
        query_scale: scores are divided by its square root.
        attention_softcap, logit_softcap: see `ops.soft_cap`; None leaves them.
    """

    DEFAULTS: ClassVar[dict[str, Any]] = {
        "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 8192,
        "sliding_window": 4096, "eos_token_id": 1,
    }  # fmt: skip
    FIXED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "hidden_act": (None, gemma.TANH),
        "mlp_bias": (None, False),
        "use_bidirectional_attention": (None, False),
    }
    HARMLESS: ClassVar[frozenset[str]] = frozenset({"cache_implementation", "sliding_window_size"})
    PATTERN: ClassVar[int] = 2

    hidden_act: str = setting("hidden_activation", gemma.TANH)
    tie_word_embeddings: bool = setting("tie_word_embeddings", True)
    query_scale: int = setting("query_pre_attn_scalar", 256)
    attention_softcap: float | None = setting("attn_logit_softcapping", 50.0)
    logit_softcap: float | None = setting("final_logit_softcapping", 30.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("attention_softcap", "logit_softcap"):
            cap = getattr(self, name)
            if cap is not None and cap <= 0:
                raise ConfigError(f"config {self._key(name)}: expected above 0 or null, got {cap}")


def network(config: Config) -> Network:
    """The layers of one config."""
    layers = gemma.stack(config, lambda i: layer(config, i, attention(config, i)))
    return replace(layers, softcap=config.logit_softcap)


def layer(config: Config, i: int, mix: Part) -> Sandwich:
    """One layer around its attention."""
    name = f"model.layers.{i}"
    return Sandwich(
        mix_norm=gemma.norm(config, f"{name}.input_layernorm"),
        mix=mix,
        mix_post_norm=gemma.norm(config, f"{name}.post_attention_layernorm"),
        mlp_norm=gemma.norm(config, f"{name}.pre_feedforward_layernorm"),
        mlp=gated_mlp(
            f"{name}.mlp", config.hidden_size, config.intermediate_size, config.hidden_act
        ),
        mlp_post_norm=gemma.norm(config, f"{name}.post_feedforward_layernorm"),
    )


def attention(config: Config, i: int) -> Attention:
    """Attention of one layer."""
    return replace(
        llama.attention(config, i),
        scale=config.query_scale**-0.5,
        window=config.window(i),
        softcap=config.attention_softcap,
    )
