"""`ModelConfig`: what a model is, read once from a Hugging Face config and frozen."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from funcrt.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu")

_USED = {
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act",
    "max_position_embeddings", "original_max_position_embeddings", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "sliding_window", "eos_token_id",
    "rope_theta", "rope_scaling", "rope_parameters", "quantization", "quantization_config",
}  # fmt: skip

# Keys that cannot change the logits of a trained text model at inference.
_HARMLESS = {
    "_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout",
    "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "funcrt_version", "id2label", "initializer_range",
    "is_llama_config", "label2id", "pad_token_id", "problem_type", "return_dict", "torch_dtype",
    "transformers.js_config", "transformers_version", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip

# Keys that change the logits unless they hold the value that this implementation computes.
_FIXED: dict[str, tuple[Any, ...]] = {
    "pretraining_tp": (None, 1),
    "rope_interleaved": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
}

_WINDOWED = {"mistral"}  # a query sees keys less than `sliding_window` positions before it

# What transformers fills in where a family's config.json leaves a key out; null is not left out.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "mistral": {
        "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
}  # fmt: skip

_ROPE_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    },
}  # fmt: skip
_ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base and length scaling, spelled as in Hugging Face configs.

    `original_max_positions` is the context length of pretraining, in tokens. `attention_factor`
    multiplies cos and sin (yarn only; None derives it as in the paper, arXiv:2309.00071 §3.4).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_positions: int = 2048
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> RopeConfig:
        """Read either spelling: `rope_parameters`, or `rope_theta` with `rope_scaling`.

        Raises ConfigError when the two disagree, or for a kind or key that is not supported.
        """
        old = dict(hf.get("rope_scaling") or {})
        new = dict(hf.get("rope_parameters") or {})
        if any(isinstance(value, Mapping) for value in new.values()):
            raise ConfigError("rope_parameters per layer type are not supported for this model")
        for spelling in (old, new):
            if "type" in spelling:
                kind = spelling.pop("type")
                if spelling.setdefault("rope_type", kind) != kind:
                    raise ConfigError(
                        f"rope scaling names two kinds: type={kind!r} and "
                        f"rope_type={spelling['rope_type']!r}; keep one"
                    )
        if hf.get("rope_theta") is not None:
            old["rope_theta"] = hf["rope_theta"]
        for key in old.keys() & new.keys():
            if old[key] != new[key]:
                raise ConfigError(
                    f"rope_parameters says {key}={new[key]!r}, the older spelling says "
                    f"{old[key]!r}; keep the one the weights were trained with"
                )
        rope = {**old, **new}
        if "factor" in rope and "rope_type" not in rope:
            raise ConfigError(
                f"rope scaling has a factor ({rope['factor']!r}) but no rope_type; "
                f"known: {', '.join(ROPE_KINDS)}"
            )
        kind = rope.pop("rope_type", "default") or "default"
        theta = rope.pop("rope_theta", 10000.0)
        if kind not in ROPE_KINDS:
            raise ConfigError(
                f"rope type {kind!r} is not supported; known: {', '.join(ROPE_KINDS)}"
            )
        # `dynamic` stretches from max_position_embeddings whatever else the config says.
        original = rope.pop("original_max_position_embeddings", None)
        if kind in ("llama3", "yarn"):
            original = hf.get("original_max_position_embeddings") or original
        if original is None or kind == "dynamic":
            original = hf.get("max_position_embeddings", 2048)
        if rope.pop("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
            raise ConfigError("partial_rotary_factor below 1 is not supported for this model")
        unset = {"beta_fast": (None, 0), "beta_slow": (None, 0)}  # 0 stands for the default
        rope = {k: v for k, v in rope.items() if v not in unset.get(k, (None,))}
        if kind == "yarn" and "factor" not in rope:
            rope["factor"] = hf.get("max_position_embeddings", 2048) / original
        if kind == "default":
            rope.pop("factor", None)
        unknown = sorted(rope.keys() - _ROPE_KEYS[kind])
        if unknown:
            raise ConfigError(f"rope type {kind!r} does not take {', '.join(unknown)}")
        missing = [key for key in _ROPE_REQUIRED[kind] if key not in rope]
        if missing:
            raise ConfigError(f"rope type {kind!r} needs {', '.join(missing)}")
        for key, value in [("rope_theta", theta), *rope.items()]:
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(f"rope {key}: expected a finite number, got {value!r}")
        if theta <= 1 or rope.get("factor", 1.0) <= 0 or original <= 0:
            raise ConfigError("rope theta must be above 1, factor and original length positive")
        return cls(theta=float(theta), kind=kind, original_max_positions=int(original), **rope)

    def to_hf(self) -> dict[str, Any]:
        """The older spelling, which both mlx-lm and transformers read."""
        if self.kind == "default":
            return {"rope_theta": self.theta, "rope_scaling": None}
        scaling: dict[str, Any] = {
            "rope_type": self.kind,
            **{k: v for k in sorted(_ROPE_KEYS[self.kind]) if (v := getattr(self, k)) is not None},
        }
        if self.kind in ("llama3", "yarn"):
            scaling["original_max_position_embeddings"] = self.original_max_positions
        return {"rope_theta": self.theta, "rope_scaling": scaling}


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape and constants. `dtype` is that of activations, cache and logits."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    max_positions: int
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.model_type, str):
            raise ConfigError(f"config model_type: expected a string, got {self.model_type!r}")
        # Without it, the zeroed rows of padding would divide by zero.
        if not math.isfinite(self.norm_eps) or self.norm_eps <= 0:
            raise ConfigError(f"config rms_norm_eps: expected above 0, got {self.norm_eps!r}")
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
                     "num_kv_heads", "head_dim", "max_positions"):  # fmt: skip
            _check_size(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.sliding_window is not None:
            if self.model_type not in _WINDOWED:
                raise ConfigError(
                    f"config sliding_window={self.sliding_window!r} is not supported for "
                    f"{self.model_type!r}"
                )
            _check_size("sliding_window", self.sliding_window)
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rotary embedding, got {self.head_dim}")
        if self.hidden_act not in ACTIVATIONS:
            raise ConfigError(
                f"activation {self.hidden_act!r} is not supported; known: {', '.join(ACTIVATIONS)}"
            )
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r} is not supported; use {', '.join(DTYPES)}")

    @classmethod
    def from_hf(
        cls, hf: Mapping[str, Any], dtype: str = "float32", ignore: Collection[str] = ()
    ) -> ModelConfig:
        """Read a Hugging Face `config.json`.

        Args:
            hf: the parsed file.
            dtype: compute dtype, see the class.
            ignore: names of keys known not to matter for this checkpoint.

        Raises:
            ConfigError: a required key is absent, or a key that may change the result is unknown
                or holds a value that is not implemented.
        """
        try:
            return cls._read({key: value for key, value in hf.items() if key not in ignore}, dtype)
        except ConfigError:
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ConfigError(f"config.json holds a value of a wrong type: {error}") from None

    @classmethod
    def _read(cls, hf: Mapping[str, Any], dtype: str) -> ModelConfig:
        _check_keys(hf)
        hf = {**_LEFT_OUT.get(str(hf.get("model_type")), {}), **hf}
        heads = _required(hf, "num_attention_heads")
        hidden = _required(hf, "hidden_size")
        if hf.get("head_dim") is None and hidden % heads:
            raise ConfigError(
                f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads}) "
                "and no head_dim is given"
            )
        return cls(
            model_type=_required(hf, "model_type"),
            vocab_size=_required(hf, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(hf, "intermediate_size"),
            num_layers=_required(hf, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=heads if (n := hf.get("num_key_value_heads")) is None else n,
            head_dim=hidden // heads if (d := hf.get("head_dim")) is None else d,
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            rope=RopeConfig.from_hf(hf),
            max_positions=hf.get("max_position_embeddings", 2048),
            hidden_act=hf.get("hidden_act", "silu"),
            attention_bias=bool(hf.get("attention_bias", False)),
            mlp_bias=bool(hf.get("mlp_bias", False)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            sliding_window=hf.get("sliding_window"),
            eos_token_ids=_ids(hf.get("eos_token_id")),
            dtype=dtype,
        )

    def to_hf(self) -> dict[str, Any]:
        """A Hugging Face `config.json` that `from_hf`, transformers and mlx-lm read alike."""
        return {
            "architectures": [f"{self.model_type.capitalize()}ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_eps,
            "hidden_act": self.hidden_act,
            "max_position_embeddings": self.max_positions,
            "attention_bias": self.attention_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tie_word_embeddings,
            **({} if self.model_type not in _WINDOWED else {"sliding_window": self.sliding_window}),
            "eos_token_id": list(self.eos_token_ids) or None,
            **self.rope.to_hf(),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`. Raises ConfigError for missing or unknown fields."""
        try:
            ids = tuple(data.get("eos_token_ids", ()))
            return cls(**{**data, "rope": RopeConfig(**data["rope"]), "eos_token_ids": ids})
        except (KeyError, TypeError) as error:
            raise ConfigError(f"model config does not have the expected fields: {error}") from None


def _check_size(name: str, value: object) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 0 < value < 1 << 31:  # type: ignore[operator]
        raise ConfigError(f"config {name}: expected a positive int32, got {value!r}")


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    return tuple(int(token) for token in ids)


def _required(hf: Mapping[str, Any], key: str) -> Any:
    if hf.get(key) is None:
        raise ConfigError(f"config.json has no {key!r}")
    return hf[key]


def _check_keys(hf: Mapping[str, Any]) -> None:
    for key, allowed in _FIXED.items():
        if hf.get(key) not in allowed:
            raise ConfigError(f"config {key}={hf[key]!r} is not supported for {hf['model_type']!r}")
    for key in ("quantization", "quantization_config"):
        method = (hf.get(key) or {}).get("quant_method")
        if method is not None:
            raise ConfigError(
                f"weights quantized with {method!r} are not supported; "
                "use a dense checkpoint or one quantized by MLX"
            )
    # None and false switch a feature off, so an unknown key holding them changes nothing.
    unknown = sorted(
        key
        for key, value in hf.items()
        if key not in _USED | _HARMLESS | _FIXED.keys() and value is not None and value is not False
    )
    if unknown:
        raise ConfigError(
            f"config keys that may change the result are unknown: {', '.join(unknown)}; "
            "if they do not matter for this checkpoint, name them in `ignore`"
        )
