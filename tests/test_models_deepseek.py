"""DeepSeek's families beside the checklist: absorbing a matrix, and what their configs say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import converters
from funcrt import cache, masks
from funcrt.errors import ConfigError
from funcrt.layers import Linear, RMSNorm, Run, Stacked
from funcrt.layers.latent import LatentAttention
from funcrt.models import read_config
from funcrt.params import FLOATS, Params
from funcrt.rope import RopeConfig
from tests.families.cases import Case, run_plain
from tests.helpers import ROUNDING, TOLERANCE, Array, relative_error, to_numpy
from tests.reference.golden import family_folder

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


# --- configs --------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
}  # fmt: skip
# What the configuration classes of transformers 5.24 fill in.
FILLED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "dense_layers": 0, "expert_size": 1407, "head_dim": 64, "kept_groups": None,
        "kv_lora_rank": 512, "max_positions": 2048, "norm_eps": 1e-6, "num_experts": 64,
        "num_groups": None, "num_kv_heads": 128, "num_shared": 2, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scale": 1.0,
        "topk_method": "greedy", "v_head_dim": 128,
    },
    "deepseek_v3": {
        "dense_layers": 3, "expert_size": 2048, "head_dim": 64, "kept_groups": 4,
        "kv_lora_rank": 512, "max_positions": 4096, "norm_eps": 1e-6, "normalize": True,
        "num_ahead": 1, "num_chosen": 8, "num_experts": 256, "num_groups": 8,
        "num_kv_heads": 128, "num_shared": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rope_interleave": True, "routed_scale": 2.5, "v_head_dim": 128,
    },
}  # fmt: skip


def published(case: str, **changes: Any) -> dict[str, Any]:
    return {**json.loads((family_folder(case) / "config.json").read_text()), **changes}


@pytest.mark.parametrize("model_type", FILLED)
def test_defaults_are_those_of_transformers(model_type: str):
    hf = {"model_type": model_type, "num_attention_heads": 128, "num_experts_per_tok": 8, **SIZES}
    config = read_config(hf)
    assert {name: getattr(config, name) for name in FILLED[model_type]} == FILLED[model_type]
    assert config.rope.theta == 10000.0


@pytest.mark.parametrize("case", ["deepseek_v2", "deepseek_v2-lite", "deepseek_v3"])
def test_config_is_written_back(case: str):
    config = read_config(published(case))
    assert read_config(config.to_hf()) == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.to_hf()["architectures"] == published(case)["architectures"]


@pytest.mark.parametrize(
    ("case", "changes", "said"),
    [
        ("deepseek_v2", {"topk_method": "gready"}, "'gready' is not supported; known: greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("deepseek_v2", {"n_group": None}, "n_group, topk_group: expected whole numbers"),
        ("deepseek_v2", {"n_group": 4}, "groups must divide the experts"),
        ("deepseek_v2", {"num_experts_per_tok": 4}, "4 of 6 experts in 1 of 2 groups"),
        ("deepseek_v2-lite", {"num_experts_per_tok": 7}, "7 of 6 experts"),
        ("deepseek_v2", {"num_key_value_heads": 2}, "expected as many as num_attention_heads"),
        ("deepseek_v2", {"qk_rope_head_dim": 7}, "must be even"),
        ("deepseek_v2", {"kv_lora_rank": "32"}, "kv_lora_rank: expected a whole number"),
        ("deepseek_v2", {"q_lora_rank": 0}, "q_lora_rank: expected a positive int32"),
        ("deepseek_v2", {"num_experts_per_tok": None}, "no 'num_experts_per_tok'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        ("deepseek_v3", {"n_group": 6, "topk_group": 6}, "hold at least 2 each"),
        ("deepseek_v3", {"topk_group": 3}, "in 3 of 2 groups"),
        ("deepseek_v3", {"mlp_bias": True}, "mlp_bias=True"),
        ("deepseek_v3", {"routed_scaling_factor": True}, "a finite number"),
    ],
)
def test_config_is_refused(case: str, changes: dict[str, Any], said: str):
    with pytest.raises(ConfigError, match=said):
        read_config(published(case, **changes))


def test_what_corrects_routing_stays_exact():
    model = converters.load(family_folder("deepseek_v3"), dtype="bfloat16")
    exact = {
        name
        for params in (model.params, model.prepared)
        for name, array in params.items()
        if array.dtype == mx.float32
    }
    assert exact == {"model.layers.1.mlp.gate.e_score_correction_bias"}


def swap_layers(params: Params) -> Params:
    """The first two layers in the other order."""
    numbers = {"model.layers.0.": "model.layers.1.", "model.layers.1.": "model.layers.0."}
    return {numbers.get(name[:15], name[:15]) + name[15:]: array for name, array in params.items()}


def test_every_other_layer_has_experts(tmp_path: Path):
    """As mlx-lm and DeepSeek's own code read `moe_layer_freq`; transformers does not."""
    with Case("deepseek_v3") as case:
        # One group: of several, mlx-lm may choose from one that is not kept.
        groups = {"n_group": 1, "topk_group": 1}
        hf = {**case.hf, "first_k_dense_replace": 0, "moe_layer_freq": 2, **groups}
        (tmp_path / "config.json").write_text(json.dumps(hf))
        params = swap_layers(mx.load(str(case.folder / "model.safetensors")))
        mx.save_safetensors(str(tmp_path / "model.safetensors"), params)
        ours, theirs = (
            run_plain(converters.load(tmp_path, "float32", via=via), case.prompt)
            for via in (None, "mlx_lm")
        )
        assert relative_error(ours, theirs) < TOLERANCE
        assert relative_error(ours, case.whole) > 100 * TOLERANCE
