"""Rotary embedding against planes turned one by one, in double precision."""

from __future__ import annotations

import math
from typing import Any

from funcrt.config.rope import RopeConfig
from funcrt.errors import ConfigError
from funcrt.ops.rotary import attention_factor, frequencies, make_rotary, rotary_dims
from tests.helpers import Array, to_numpy

import mlx.core as mx
import numpy as np
import pytest

BATCH, HEADS, TOKENS, WIDTH = 3, 2, 5, 16
OFFSETS = [0, 90, 126]  # the last row crosses the original length
ORIGINAL = 128
LONGROPE: dict[str, Any] = {
    "short_factor": tuple(1 + 0.1 * i for i in range(8)),
    "long_factor": tuple(2 + 0.5 * i for i in range(8)),
    "factor": 4.0,
}
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0},
    "yarn": {"factor": 4.0},
    "longrope": LONGROPE,
}


def make_rope(kind: str, partial: float = 1.0, interleaved: bool = False) -> RopeConfig:
    more = dict(KINDS[kind])
    for key in ("short_factor", "long_factor"):
        if key in more:
            more[key] = more[key][: int(8 * partial)]
    return RopeConfig(
        theta=5000.0, kind=kind, original_max_positions=ORIGINAL, partial=partial,
        interleaved=interleaved, **more,
    )  # fmt: skip


def turn(rope: RopeConfig, x: Array, positions: Array) -> Array:
    """Every plane of `x [B, N, T, D]` at `positions [B, T]`; rows by the longest of theirs."""
    out, dims = x.astype(np.float64), rotary_dims(rope, x.shape[-1])
    for row, at in enumerate(positions):
        total = int(at.max()) + 1
        for i, frequency in enumerate(_of_row(rope, dims, total)):
            low, high = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + dims // 2)
            a, b = x[row, :, :, low].astype(np.float64), x[row, :, :, high].astype(np.float64)
            cos, sin = np.cos(at * frequency), np.sin(at * frequency)
            out[row, :, :, low] = (a * cos - b * sin) * attention_factor(rope)
            out[row, :, :, high] = (b * cos + a * sin) * attention_factor(rope)
    return out


def _of_row(rope: RopeConfig, dims: int, total: int) -> list[float]:
    if rope.kind == "dynamic":
        stretch = rope.factor * max(total, ORIGINAL) / ORIGINAL - (rope.factor - 1)
        base = rope.theta * stretch ** (dims / (dims - 2))
        return [base ** (-2 * i / dims) for i in range(dims // 2)]
    if rope.kind == "longrope":
        divisors = rope.long_factor if total > ORIGINAL else rope.short_factor
        return [rope.theta ** (-2 * i / dims) / divisor for i, divisor in enumerate(divisors)]
    return frequencies(rope, dims)


@pytest.mark.parametrize("given", [False, True], ids=["slots", "positions"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_turns_as_its_planes_do(kind, partial, interleaved, given):
    rope = make_rope(kind, partial, interleaved)
    x = np.random.default_rng(0).normal(size=(BATCH, HEADS, TOKENS, WIDTH)).astype(np.float32)
    positions = np.array(OFFSETS)[:, None] + np.arange(TOKENS)
    offset = mx.array(OFFSETS, dtype=mx.int32)
    rotary = make_rotary(
        rope, WIDTH, offset, offset + TOKENS, TOKENS,
        mx.array(positions, dtype=mx.int32) if given else None,
    )  # fmt: skip
    turned = to_numpy(rotary(mx.array(x)))
    assert np.abs(turned - turn(rope, x, positions)).max() < 3e-5
    assert rotary(mx.array(x, dtype=mx.bfloat16)).dtype == mx.bfloat16
    if partial != 1.0:
        assert np.array_equal(turned[..., 8:], x[..., 8:])


def test_longrope_switches_after_the_original_length_each_row_for_itself():
    rope = make_rope("longrope")
    x = mx.ones((2, 1, 1, WIDTH))
    # The last token within the original length, and the first one past it.
    offset = mx.array([ORIGINAL - 1, ORIGINAL], dtype=mx.int32)
    turned = make_rotary(rope, WIDTH, offset, offset + 1, 1, None)(x)
    for row, divisors in enumerate((rope.short_factor, rope.long_factor)):
        angle = (ORIGINAL - 1 + row) / (divisors[1] * rope.theta ** (2 / WIDTH))
        expected = (math.cos(angle) - math.sin(angle)) * attention_factor(rope)
        assert abs(turned[row, 0, 0, 1].item() - expected) < 3e-5


@pytest.mark.parametrize(
    ("rope", "width", "match"),
    [
        (make_rope("default"), 15, "head_dim must be even"),
        (make_rope("default", 0.25), 20, "got 20, of which 5 turn"),
        (make_rope("default", 0.25), 2, "of which 0 turn"),
        (make_rope("dynamic"), 2, "at least 4, got 2"),
        (make_rope("longrope"), 18, "short_factor: expected 9 numbers for a head_dim of 18, got 8"),
        (make_rope("longrope", 0.5), 32, "short_factor: expected 8 .* of 32, got 4"),
    ],
)
def test_widths_that_cannot_turn_are_refused(rope, width, match):
    with pytest.raises(ConfigError, match=match):
        rope.check_width(width)
