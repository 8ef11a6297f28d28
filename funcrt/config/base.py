"""`ModelConfig`: what a model is, read once from a Hugging Face config and frozen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from funcrt.config.fields import check_fields, from_dict, hf_keys, read_fields, setting
from funcrt.config.rope import RopeConfig
from funcrt.errors import ConfigError

DTYPES = ("float32", "float16", "bfloat16")
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu")

# Read for every family, by `RopeConfig`, by whoever reads the weights, or into a field by hand.
_USED = {
    "model_type", "eos_token_id", "original_max_position_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor",
    "quantization", "quantization_config",
}  # fmt: skip

# Keys that cannot change the logits of a trained text model at inference.
_HARMLESS = {
    "_attn_implementation", "_attn_implementation_autoset", "_name_or_path", "attention_dropout",
    "attn_implementation", "auto_map", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "funcrt_version", "id2label", "initializer_range",
    "is_llama_config", "label2id", "pad_token_id", "pretraining_tp", "problem_type", "return_dict",
    "torch_dtype",
    "transformers.js_config", "transformers_version", "unk_token_id",
    "unsloth_fixed", "unsloth_version", "use_cache",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder's shape and constants. `dtype` is that of activations, cache and logits.

    What all families share; a family whose config.json holds more derives its own class from it.

    Class attributes of a family:
        DEFAULTS: what transformers fills in where a config.json leaves a key out (null is not left
            out).
        FIXED: keys that change the logits unless they hold one of the values given here, which are
            what is computed.
        HARMLESS: keys that change nothing, besides those that mean nothing in any family.
        WINDOWED: whether a sliding window is possible.
        PARTIAL_ROTARY: whether only a part of each head may turn.
        INTERLEAVED: whether neighbours form the planes that turn, not the two halves of a head.
        ROPE_DEFAULTS: what transformers fills in for `rope_theta` and `partial_rotary_factor`.
    """

    DEFAULTS: ClassVar[Mapping[str, Any]] = {}
    FIXED: ClassVar[Mapping[str, tuple[Any, ...]]] = {"rope_interleaved": (None, False)}
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    WINDOWED: ClassVar[bool] = False
    PARTIAL_ROTARY: ClassVar[bool] = False
    INTERLEAVED: ClassVar[bool] = False
    ROPE_DEFAULTS: ClassVar[Mapping[str, Any]] = {}

    model_type: str
    vocab_size: int = setting("vocab_size")
    hidden_size: int = setting("hidden_size")
    intermediate_size: int = setting("intermediate_size")
    num_layers: int = setting("num_hidden_layers")
    num_heads: int = setting("num_attention_heads")
    num_kv_heads: int = setting("num_key_value_heads")
    head_dim: int = setting("head_dim")
    norm_eps: float = setting("rms_norm_eps")
    rope: RopeConfig
    max_positions: int = setting("max_position_embeddings")
    hidden_act: str = setting("hidden_act", "silu")
    attention_bias: bool = setting("attention_bias", False)
    mlp_bias: bool = setting("mlp_bias", False)
    tie_word_embeddings: bool = setting("tie_word_embeddings", False)
    sliding_window: int | None = setting("sliding_window", None)
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    architectures: tuple[str, ...] = field(
        default=(), metadata={"key": "architectures"}, compare=False
    )

    def __post_init__(self) -> None:
        check_fields(self)
        # Without it, the zeroed rows of padding would divide by zero.
        if self.norm_eps <= 0:
            raise ConfigError(
                f"config {self._key('norm_eps')}: expected above 0, got {self.norm_eps}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self._key('num_heads')} ({self.num_heads}) must be a multiple of "
                f"{self._key('num_kv_heads')} ({self.num_kv_heads})"
            )
        self.rope.check_width(self.head_dim)
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
        """Read a Hugging Face `config.json` of this class's family.

        `funcrt.models.read_config` finds the class by `model_type`.

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
        if not isinstance(hf.get("model_type"), str):
            what = "no 'model_type'" if hf.get("model_type") is None else "a wrong model_type"
            raise ConfigError(
                f"config.json has {what}: expected a string, got {hf.get('model_type')!r}"
            )
        # Null is written for models that were never saved as a class.
        given = {k: v for k, v in hf.items() if k != "architectures" or v is not None}
        hf = cls.fill({**cls.DEFAULTS, **given})
        cls._check_keys(hf)
        values: dict[str, Any] = read_fields(cls, hf)
        for name, spelled in cls.ropes(hf).items():
            values[name] = RopeConfig.from_hf(
                spelled, cls.PARTIAL_ROTARY, cls.INTERLEAVED, cls.ROPE_DEFAULTS
            )
        eos = _ids(hf.get("eos_token_id"))
        return cls(model_type=hf["model_type"], eos_token_ids=eos, dtype=dtype, **values)

    @classmethod
    def fill(cls, hf: dict[str, Any]) -> dict[str, Any]:
        """The config with what follows from other keys, and older spellings in the newer one."""
        keys = hf_keys(cls)
        hf.setdefault(keys["norm_eps"], 1e-6)
        hf.setdefault(keys["max_positions"], 2048)
        hidden, heads = hf.get(keys["hidden_size"]), hf.get(keys["num_heads"])
        if hf.get(keys["num_kv_heads"]) is None:
            hf[keys["num_kv_heads"]] = heads
        if hf.get("head_dim") is None and hidden is not None and heads is not None:
            if hidden % heads:
                raise ConfigError(
                    f"{keys['hidden_size']} ({hidden}) is not a multiple of "
                    f"{keys['num_heads']} ({heads}) "
                    "and no head_dim is given"
                )
            hf["head_dim"] = hidden // heads
        return hf

    @property
    def position_limit(self) -> int | None:
        """How many positions there are, where there is a vector for each; None: any number."""
        return None

    def unused_tensors(self) -> tuple[str, ...]:
        """Prefixes of tensors that published files may hold and that change no logits."""
        return ()

    @classmethod
    def ropes(cls, hf: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
        """Field -> the config as `RopeConfig.from_hf` reads it, for every rope of the model."""
        return {"rope": hf}

    @classmethod
    def _check_keys(cls, hf: Mapping[str, Any]) -> None:
        fixed = {"is_causal": (None, True), **cls.FIXED}  # off would be no harmless value
        for key, allowed in fixed.items():
            if hf.get(key) not in allowed:
                raise ConfigError(
                    f"config {key}={hf[key]!r} is not supported for {hf['model_type']!r}"
                )
        if hf.get("sliding_window") is not None and not cls.WINDOWED:
            raise ConfigError(
                f"config sliding_window={hf['sliding_window']!r} is not supported for "
                f"{hf['model_type']!r}"
            )
        for key in ("quantization", "quantization_config"):
            method = (hf.get(key) or {}).get("quant_method")
            if method is not None:
                raise ConfigError(
                    f"weights quantized with {method!r} are not supported; "
                    "use a dense checkpoint or one quantized by MLX"
                )
        known = _USED | _HARMLESS | cls.HARMLESS | fixed.keys() | set(hf_keys(cls).values())
        # None and false switch a feature off, so an unknown key holding them changes nothing.
        unknown = sorted(
            key
            for key, value in hf.items()
            if key not in known and value is not None and value is not False
        )
        if unknown:
            raise ConfigError(
                f"config keys that may change the result are unknown: {', '.join(unknown)}; "
                "if they do not matter for this checkpoint, name them in `ignore`"
            )

    def to_hf(self) -> dict[str, Any]:
        """A Hugging Face `config.json` that `from_hf`, transformers and mlx-lm read alike."""
        keys = hf_keys(type(self))
        values = {keys[name]: _plain(getattr(self, name)) for name in keys}
        if not self.WINDOWED:
            del values["sliding_window"]
        name = "".join(word.capitalize() for word in self.model_type.split("_")) + "ForCausalLM"
        return {
            **values,
            "architectures": list(self.architectures) or [name],
            "model_type": self.model_type,
            "eos_token_id": list(self.eos_token_ids) or None,
            "pad_token_id": None,  # transformers may fill in one past a smaller vocabulary
            **self.rope.to_hf(self.PARTIAL_ROTARY),
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`. Raises ConfigError for missing or unknown fields."""
        config: ModelConfig = from_dict(cls, data)
        return config

    def _key(self, name: str) -> str:
        return hf_keys(type(self))[name]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _ids(value: Any) -> tuple[int, ...]:
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    return tuple(int(token) for token in ids)
