"""How a GGUF file says that positions turn: metadata, and tensors that scale frequencies."""

from __future__ import annotations

import math
from typing import Any

from converters.gguf.metadata import Metadata
from converters.gguf.tensors import read_tensor
from funcrt.errors import ConfigError

import numpy as np

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS = {
    "long_factor": "rope_factors_long.weight",
    "short_factor": "rope_factors_short.weight",
}
ROPE_TENSORS = (ROPE_FACTORS, *LONG_FACTORS.values())


def rope_scaling(own: Metadata, theta: float, dims: int) -> dict[str, Any] | None:
    """`rope_scaling` of a Hugging Face config, or None.

    Args:
        own: the metadata.
        theta: the base.
        dims: how many dimensions of a head turn.

    Raises ConfigError for scaling that is not known or contradicts itself.
    """
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear")) or 1.0
    # Files older than the type only had the factor.
    kind = own.get("rope.scaling.type", "none" if factor == 1 else "linear")
    original = own.get("rope.scaling.original_context_length")
    if all(own.has(name) for name in LONG_FACTORS.values()):
        return _longrope(own, dims, original)
    if own.has(ROPE_FACTORS):
        if kind not in ("none", "linear") or factor != 1:
            raise ConfigError(f"{own.path}: {ROPE_FACTORS} beside {kind} scaling is not supported")
        return _llama3(own, theta, dims, original)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(
            f"{own.path}: rope scaling {kind!r} is not supported; known: linear, yarn"
        )
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": own.get("rope.scaling.yarn_attn_factor"),
        "beta_fast": own.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": own.get("rope.scaling.yarn_beta_slow"),
    }
    return {key: value for key, value in scaling.items() if value is not None}


def _longrope(own: Metadata, dims: int, original: Any) -> dict[str, Any]:
    factors = {key: _values(own, name, dims) for key, name in LONG_FACTORS.items()}
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": original or own.count("context_length"),
        "attention_factor": own.get("rope.scaling.attn_factor"),
        **{key: [float(str(value)) for value in values] for key, values in factors.items()},
    }


def _values(own: Metadata, name: str, dims: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    tensor = own.tensors[name]
    if tensor.kind not in ("F32", "F16") or tensor.shape != (dims // 2,):
        raise ConfigError(
            f"{own.path}: {name} should be F32 ({dims // 2},), got {tensor.kind} {tensor.shape}"
        )
    values = np.array(read_tensor(tensor)[""]).astype(np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(
            f"{own.path}: {name} divides frequencies; expected numbers above 0, "
            f"got {values.min():.4g} to {values.max():.4g}"
        )
    return values


def _llama3(own: Metadata, theta: float, dims: int, original: Any) -> dict[str, Any] | None:
    """Read back the llama3 scaling from the divisors of the frequencies that it was baked into.

    Divisors that are none of llama3's are kept as the table that they are.

    With s = (original / wavelength - low) / (high - low), clipped to 0..1, a frequency is divided
    by 1 / ((1 - s) / factor + s) (transformers' `rope_type` llama3). Between the clips s is a line
    in 1 / wavelength; its slope and offset give `original` and `high` for low = 1, and any other
    low describes the same frequencies.
    """
    divisors = _values(own, ROPE_FACTORS, dims).astype(np.float64)
    if (divisors == 1).all():
        return None
    steps = np.arange(divisors.size) / divisors.size
    inverse_wavelengths = theta**-steps / (2 * math.pi)
    factor = divisors.max()
    guesses = [(original if isinstance(original, int) else 8192, 4.0)]
    with np.errstate(all="ignore"):  # where it is no such line
        s = (1 / divisors - 1 / factor) / (1 - 1 / factor)
        between = (s > 1e-3) & (s < 1 - 1e-3)
        if between.sum() >= 2:
            slope, offset = np.polyfit(inverse_wavelengths[between], s[between], 1)
            length, high = -slope / offset, 1 - 1 / offset
            if np.isfinite([length, high]).all():
                guesses.append((round(float(length)), round(float(high), 3)))
        if between.any():  # for the usual high, one point gives the line
            length = (s[between] * 3.0 + 1) / inverse_wavelengths[between]
            guesses.append((round(float(length[0])), 4.0))
        for length, high in guesses:
            line = ((length * inverse_wavelengths - 1) / (high - 1)).clip(0, 1)
            if np.allclose(1 / ((1 - line) / factor + line), divisors, rtol=1e-4, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": float(factor),
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
    # Any other table is what longrope does with one table for short and long texts.
    table = [float(str(value)) for value in divisors.astype(np.float32)]
    return {
        "rope_type": "longrope",
        "original_max_position_embeddings": own.count("context_length"),
        "attention_factor": 1.0,
        "factor": 1.0,
        "long_factor": table,
        "short_factor": table,
    }
