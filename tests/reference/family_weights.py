"""How the random weights of the family cases are drawn, and what a case is."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

CHUNKS = (200, 24, 7, 308, 1)


class Normal(NamedTuple):
    """Normal with deviation gain / sqrt(inputs); `axis` holds the inputs. None: deviation gain."""

    gain: float
    axis: int | None = -1

    @property
    def neutral(self) -> float:
        return 0.0

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        inputs = 1 if self.axis is None else shape[self.axis]
        return rng.normal(0.0, self.gain / np.sqrt(inputs), shape)


class Uniform(NamedTuple):
    """Uniform in [low, high]; the middle is what stands for "as if it were not there"."""

    low: float
    high: float

    @property
    def neutral(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return rng.uniform(self.low, self.high, shape)


Rule = Normal | Uniform
Rules = dict[str, Rule]
Changes = dict[str, dict[str, Any]]  # what is switched off: keys of the config and new values

NORM = Uniform(0.6, 1.4)
OFFSET_NORM = Uniform(-0.4, 0.4)  # of norms that multiply by 1 + weight
# The first pattern found in a name decides. Queries and keys are large enough for
# sharp attention.
RULES: Rules = {
    r"\.(q|k)_(layer)?norm\.weight$": Uniform(1.0, 2.2),
    r"(norm|layernorm|ln_\w+|norm_f)\.weight$": NORM,
    r"e_score_correction_bias$": Normal(0.2, axis=None),
    r"bias$": Normal(0.3, axis=None),
    r"(embed_tokens|embed_in|embeddings|wte|lm_head|embed_out)\.weight$": Normal(2.5),
    r"\.[qk]_proj\.weight$": Normal(1.4),
    r"(qkv_proj|query_key_value)\.weight$": Normal(1.4),
    r"(\.o_proj|attention\.dense|attn\.c_proj|out_proj)\.weight$": Normal(0.5),
    r"(gate|router)\.weight$": Normal(2.0),
    r"": Normal(1.0),
}


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint.

    Attributes:
        config: its config.json.
        rules: patterns of tensor names that are drawn otherwise than `RULES` says.
        off: changes of the config, each of which must move the logits; None is a stored null.
        chunks: lengths of the pieces in which the prompt is fed a second time.
        depends: whether transformers' logits depend on these pieces.
        dtype: how the file stores tensors; values are exact in bfloat16 in any case.
        stacked: whether published files hold experts as transformers keeps them, in one tensor,
            though it saves each by itself.
        renamed: patterns and replacements from what transformers saves to what the hub has.
        ignored: tensors that published files also hold and transformers passes over.
        seed: another draw, where one came out too sensitive to rounding.
    """

    config: dict[str, Any]
    rules: Rules = field(default_factory=dict)
    off: Changes = field(default_factory=dict)
    chunks: tuple[int, ...] = CHUNKS
    depends: bool = False
    dtype: str = "bfloat16"
    stacked: bool = False
    renamed: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, tuple[int, ...]] = field(default_factory=dict)
    seed: int = 0

    def rule_of(self, name: str) -> Rule:
        """The rule that draws the tensor of this name."""
        rules = [*self.rules.items(), *RULES.items()]
        return next(rule for pattern, rule in rules if re.search(pattern, name))

    def draw(self, case: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Values of one tensor; they depend on the names, the shape and the rule alone."""
        rng = np.random.default_rng(zlib.crc32(f"{case}/{name}/{self.seed}".encode()))
        return self.rule_of(name).draw(rng, shape)


# What a config.json of any family holds; each case changes and adds.
COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "use_cache": True,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.3",
}
EPS = 0.01  # large enough for a wrong one to be seen
THETA: Changes = {"theta": {"rope_theta": 10000.0}}
NEW: dict[str, Any] = {"dtype": "bfloat16", "transformers_version": "5.24.0"}


def make_config(model_type: str, architecture: str, **rest: Any) -> dict[str, Any]:
    """config.json of a family: `COMMON` with `rest` put in; a key given as ... is left out."""
    config = {"architectures": [architecture], "model_type": model_type, **COMMON, **rest}
    return {key: value for key, value in config.items() if value is not ...}
