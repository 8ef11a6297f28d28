"""Latent attention: absorbing a matrix changes nothing, and takes the memory that is foretold."""

from __future__ import annotations

from collections.abc import Callable

from funcrt import cache, masks
from funcrt.config.rope import RopeConfig
from funcrt.layers import Linear, RMSNorm, Run, Stacked
from funcrt.layers.latent import LatentAttention
from funcrt.machine import is_on_gpu
from funcrt.model import Model
from funcrt.models import family, read_config
from funcrt.params import FLOATS, Params
from tests.helpers import ROUNDING, TOLERANCE, Array, relative_error, to_numpy
from tests.test_footprint import laid_out, measure

import mlx.core as mx
import numpy as np
import pytest

E, H, D, R, V, C, T = 64, 4, 32, 16, 32, 64, 48
QUERY, LATENT = Linear("q", E, H * (D + R)), Linear("kv", E, C + R)
PART = LatentAttention(
    layer=0, heads=H, head_dim=D, rope_dim=R, value_dim=V, rank=C,
    down=Stacked("qkv", (QUERY, LATENT)), query=None, latent_norm=RMSNorm("norm", C, 1e-6),
    up=Linear("up", C, H * (D + V)), out=Linear("out", H * V, E), scale=(D + R) ** -0.5,
    rope=RopeConfig(interleaved=True),
)  # fmt: skip
UP = "up.weight"


def make_params(seed: int = 0) -> Params:
    """Scores are large enough for attention to be peaked."""
    rng, params = np.random.default_rng(seed), Params()
    for name, shape in {k: s for part in PART.walk() for k, s in part.tensors().items()}.items():
        around, spread = (1, 0.2) if len(shape) == 1 else (0, 2 / np.sqrt(shape[1]))
        params[name] = mx.array(rng.normal(around, spread, shape).astype(np.float32))
    return params


def make_inputs(seed: int = 1) -> mx.array:
    return mx.array(np.random.default_rng(seed).normal(size=(1, T, E)).astype(np.float32))


def absorbed(params: Params, x: mx.array) -> mx.array:
    dtype = str(x.dtype).rpartition(".")[2]
    spec = (*cache.row_entries(cache.FULL), *PART.entries(dtype, cache.FULL))
    state = cache.init_cache(spec, 1, T + 1)
    mask = masks.causal(mx.ones((1, T), dtype=mx.int32), state["lengths"], T + 1)
    return PART(Run(params, mask, state, None, x.dtype), x)


def plain(params: Params, x: mx.array) -> mx.array:
    """Keys and values of every head, as the paper writes them (§2.1.2)."""

    def turn(heads: mx.array) -> mx.array:
        return mx.fast.rope(heads, R, traditional=True, base=1e4, scale=1.0, offset=0)

    q = (x @ params["q.weight"].T).reshape(1, T, H, -1).swapaxes(1, 2)
    latent, k_rope = mx.split(x @ params["kv.weight"].T, [C], axis=-1)
    latent = mx.fast.rms_norm(latent, params["norm.weight"], 1e-6)
    up = (latent @ params[UP].T).reshape(1, T, H, -1).swapaxes(1, 2)
    shared = mx.broadcast_to(turn(k_rope[:, None]), (1, H, T, R))
    q = mx.concatenate([q[..., :D], turn(q[..., D:])], axis=-1)
    scores = q @ mx.concatenate([up[..., :D], shared], axis=-1).swapaxes(-1, -2) * PART.scale
    scores = mx.where(mx.arange(T) <= mx.arange(T)[:, None], scores, -mx.inf)
    out = mx.softmax(scores, axis=-1, precise=True) @ up[..., D:]
    return out.swapaxes(1, 2).reshape(1, T, -1) @ params["out.weight"].T


def root_mean_square(array: Array) -> float:
    return float(np.sqrt((array**2).mean()))


def test_absorbed_is_plain():
    params, x = make_params(), make_inputs()
    assert relative_error(absorbed(params, x), plain(params, x)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_absorbed_rounds_as_plain(dtype: str):
    """In 16 bits too, over several draws: of one, the largest error is left to chance."""
    errors: dict[Callable[..., mx.array], list[float]] = {absorbed: [], plain: []}
    for seed in range(4):
        params = {name: array.astype(FLOATS[dtype]) for name, array in make_params(seed).items()}
        x = make_inputs(seed + 9).astype(FLOATS[dtype])
        exact = to_numpy(
            plain({name: a.astype(mx.float32) for name, a in params.items()}, x.astype(mx.float32))
        )
        for form, found in errors.items():
            out = form(params, x)
            assert out.dtype == FLOATS[dtype]
            found.append(root_mean_square(to_numpy(out) - exact) / root_mean_square(exact))
    assert 1e-4 < np.mean(errors[absorbed]) < ROUNDING * np.mean(errors[plain])


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_matrix_is_absorbed(bits: int):
    params, x = make_params(), make_inputs()
    parts = mx.quantize(params[UP], group_size=32, bits=bits)
    dense = {**params, UP: mx.dequantize(*parts, group_size=32, bits=bits)}
    packed = dict(params) | dict(zip((UP, "up.scales", "up.biases"), parts, strict=True))
    assert relative_error(absorbed(packed, x), plain(dense, x)) < TOLERANCE
    assert relative_error(plain(dense, x), plain(params, x)) > 100 * TOLERANCE


def test_gradients_go_through_absorbed():
    params, x = make_params(), make_inputs()
    ours, theirs = (
        mx.grad(lambda p, form=form: mx.sum(mx.sin(form(p, x))))(params)
        for form in (absorbed, plain)
    )
    for name, gradient in theirs.items():
        assert relative_error(ours[name], gradient) < TOLERANCE, name


@pytest.mark.skipif(is_on_gpu(), reason="fitted to the CPU backend")
@pytest.mark.parametrize("shape", [(8, 1, 1024), (1, 64, 66)], ids=str)
def test_memory_of_latents_is_foretold(shape: tuple[int, int, int]):
    config = read_config({
        "model_type": "youtu", "vocab_size": 96, "hidden_size": 512, "intermediate_size": 1024,
        "num_hidden_layers": 2, "num_attention_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 512,
    })  # fmt: skip
    spec = family(config.model_type).param_spec(config)
    model = Model(config, {name: mx.zeros(size) for name, size in spec.items()})
    step = "decode_greedy" if shape[1] == 1 else "prefill"
    foretold = laid_out(model, *shape).call(*shape, step)
    measured = measure(model, step, shape, True)
    assert 0.9 * measured <= foretold <= 2.1 * measured
