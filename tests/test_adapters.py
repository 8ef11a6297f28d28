"""Low-rank changes that are fused, kept beside the matrices, and trained."""

from __future__ import annotations

from funcrt import adapters, masks
from funcrt import params as weights
from funcrt.adapters import Adapter
from funcrt.errors import ParamsError
from funcrt.low_rank import LORA_A, LORA_B, is_low_rank
from funcrt.model import Model, load_model
from funcrt.packing import MICROSCALED, Quantization
from funcrt.params import Params
from tests.adapting import PROMPT, Q, logits_of, make_adapter, model_of
from tests.helpers import TINY, TOLERANCE, assert_same, ids, relative_error, to_numpy

import mlx.core as mx
import numpy as np
import pytest


def as_float32(model: Model) -> Model:
    return adapters.fuse(model.in_float32(), make_adapter())


def test_fused_is_the_sum_and_the_base_stays():
    model, adapter = model_of("float32"), make_adapter()
    before = dict(model.params)
    fused = adapters.fuse(model, adapter)
    assert list(fused.params) == list(model.params)
    for name, array in fused.params.items():
        change = adapter.changes.get(name.removesuffix(".weight"))
        expected = to_numpy(before[name])
        if change is not None:
            expected = expected + to_numpy(change.b) @ to_numpy(change.a)
        np.testing.assert_allclose(to_numpy(array), expected, atol=1e-6)
    assert_same(model.params, before)
    assert relative_error(logits_of(fused), logits_of(model)) > 0.1


def test_rows_of_a_scaled_sum_have_the_lengths_that_they_are_given():
    change = make_adapter().changes[Q]
    lengths = mx.arange(1, 65).astype(mx.float32)
    scaled = Adapter("dora", {Q: change._replace(magnitude=lengths)})
    model = model_of("float32")
    summed = adapters.fuse(model, Adapter("lora", {Q: change})).params[f"{Q}.weight"]
    rows = to_numpy(adapters.fuse(model, scaled).params[f"{Q}.weight"])
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), to_numpy(lengths), rtol=1e-5)
    cosines = (rows * to_numpy(summed)).sum(1) / to_numpy(lengths)
    np.testing.assert_allclose(cosines, np.linalg.norm(to_numpy(summed), axis=1), rtol=1e-5)
    with pytest.raises(ParamsError, match=f"{Q}: is scaled .DoRA., which can only be fused"):
        adapters.keep(model, scaled)


@pytest.mark.parametrize("kind", ["float32", "affine"])
def test_kept_is_fused_stored_and_prepared(kind):
    kept, expected = (
        adapters.keep(model_of(kind), make_adapter()),
        logits_of(as_float32(model_of(kind))),
    )
    assert_same({n: kept.params[n] for n in model_of(kind).params}, model_of(kind).params)
    assert relative_error(logits_of(kept), expected) < TOLERANCE
    # Stacked with the matrices: q and v have changes, k has none.
    assert f"{Q}{LORA_A}" not in kept.prepared
    assert kept.prepared[f"model.layers.0.self_attn.qkv_proj{LORA_A}"].shape == (6, 64)
    assert kept.prepared[f"model.layers.0.self_attn.qkv_proj{LORA_B}"].shape == (128, 6)
    assert relative_error(kept([PROMPT])[0][0], expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_16_bits_round_no_more_than_without(kind):
    expected = logits_of(as_float32(model_of(kind)))
    plain = relative_error(logits_of(adapters.fuse(model_of(kind), make_adapter())), expected)
    kept = adapters.keep(model_of(kind), make_adapter())
    assert relative_error(kept([PROMPT])[0][0], expected) < 1.25 * plain
    assert kept.prepared[f"model.layers.0.self_attn.qkv_proj{LORA_A}"].dtype == getattr(mx, kind)


def test_matrices_that_stay_apart_keep_their_own_changes():
    packed = dict(model_of("affine").params)
    key = "model.layers.0.self_attn.k_proj"
    weight = mx.quantize(model_of("float32").params[f"{key}.weight"], group_size=32, bits=8)
    packed |= {f"{key}.{p}": a for p, a in zip(("weight", "scales", "biases"), weight, strict=True)}
    kept = adapters.keep(Model(TINY, packed), make_adapter())
    preparation = weights.Preparation("float32", False, kept.preparation.fusions)
    ready = weights.prepare(kept.params, kept.spec, preparation)
    assert f"{Q}{LORA_A}" in ready
    assert f"model.layers.1.self_attn.qkv_proj{LORA_A}" in ready
    state, mask = kept.init_cache(1, 9), mx.tril(mx.ones((8, 9), dtype=mx.bool_))[None, None]
    logits = kept.forward(ready, ids(PROMPT), mask, state)[0]
    assert relative_error(logits[0], logits_of(kept)) < TOLERANCE


PACKINGS = [Quantization(bits, 32) for bits in (2, 3, 4, 5, 6, 8)] + list(MICROSCALED.values())


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: f"{p.mode}{p.bits}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_again_as_mlx_packs_the_sum(packing, dtype):
    names = ["weight", "scales", "biases"]
    dense = model_of("float32").params[f"{Q}.weight"].astype(getattr(mx, dtype))
    parts = dict(zip(names, mx.quantize(dense, **packing._asdict()), strict=False))
    base = Model(TINY, {
        **{n: a for n, a in model_of("float32").params.items() if n != f"{Q}.weight"},
        **{f"{Q}.{part}": array for part, array in parts.items()},
    })  # fmt: skip
    change = make_adapter().changes[Q]
    fused = adapters.fuse(base, Adapter("one", {Q: change}))
    wide = {
        n: a if a.dtype in (mx.uint32, mx.uint8) else a.astype(mx.float32) for n, a in parts.items()
    }
    total = (
        mx.dequantize(*wide.values(), **packing._asdict()).astype(mx.float32) + change.b @ change.a
    )
    expected = dict(zip(names, mx.quantize(total, **packing._asdict()), strict=False))
    for part, array in expected.items():
        assert mx.array_equal(fused.params[f"{Q}.{part}"], array.astype(parts[part].dtype)), part
    assert "1 packed matrices were packed again" in fused.notes[-1]


def test_saved_with_its_adapter_and_read_again(tmp_path):
    kept = adapters.keep(model_of("bfloat16"), make_adapter())
    kept.save(tmp_path / "model")
    again = load_model(tmp_path / "model")
    assert_same(again.params, kept.params)
    assert again.fingerprint == kept.fingerprint != model_of("bfloat16").fingerprint


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({f"{Q}{LORA_A}": (3, 64)}, f"{Q}: needs both lora_A and lora_B"),
        ({f"{Q}{LORA_A}": (3, 63), f"{Q}{LORA_B}": (64, 3)}, r"expected \[r, 64\], got \[3, 63\]"),
        ({f"{Q}{LORA_A}": (3, 64), f"{Q}{LORA_B}": (64, 2)}, r"expected \[64, 3\], got \[64, 2\]"),
        ({f"{Q}{LORA_A}": (2, 3, 64), f"{Q}{LORA_B}": (64, 3)}, r"expected \[2, 64, 3\]"),
        ({"model.norm.lora_A": (3, 64), "model.norm.lora_B": (64, 3)}, "unknown: model.norm.lora"),
        (
            {"lm_head.lora_A": (2, 3, 64), "lm_head.lora_B": (2, 96, 3)},
            "lm_head: cannot keep a change beside it for each row of a batch",
        ),
        (
            {
                f"{Q}{LORA_A}": (2, 3, 64), f"{Q}{LORA_B}": (2, 64, 3),
                "model.layers.0.mlp.up_proj.lora_A": (3, 64),
                "model.layers.0.mlp.up_proj.lora_B": (96, 3),
            },
            "equally many",
        ),
    ],
)  # fmt: skip
def test_refuses_params_that_are_no_changes(changes, match):
    params = {**model_of("float32").params, **{n: mx.zeros(s) for n, s in changes.items()}}
    with pytest.raises(ParamsError, match=match):
        Model(TINY, params)


def test_refuses_adapters_of_another_base():
    model = model_of("float32")
    change = make_adapter().changes[Q]
    far = Adapter("far", {"model.layers.7.self_attn.q_proj": change})
    wide = Adapter("wide", {Q: change._replace(a=mx.zeros((3, 96)))})
    whole = Adapter("whole", {}, {"lm_head.weight": mx.zeros((95, 64))})
    for use in (adapters.fuse, adapters.keep):
        with pytest.raises(ParamsError, match=r"far does not fit.*layers\.7.*no such matrix"):
            use(model, far)
        with pytest.raises(ParamsError, match=r"q_proj: changes \[64, 96\], but the base has"):
            use(model, wide)
        with pytest.raises(ParamsError, match=r"lm_head\.weight: \[95, 64\], but the base has"):
            use(model, whole)
    with pytest.raises(ParamsError, match="the packed matrix does not hold"):
        adapters.fuse(model_of("affine"), wide)


# --- training ------------------------------------------------------------------------------------


def test_training_changes_the_adapter_alone():
    model = model_of("affine")  # gradients pass through packed matrices, and none belong to them
    kept = adapters.keep(
        model, adapters.init_adapter(model, rank=4, matrices=["q_proj", "down_proj"])
    )
    np.testing.assert_array_equal(logits_of(kept), logits_of(model))  # B is 0
    base = {name: array for name, array in kept.params.items() if not is_low_rank(name)}
    before = {name: to_numpy(array) for name, array in base.items()}
    trained = {name: array for name, array in kept.params.items() if is_low_rank(name)}
    rows = (PROMPT, PROMPT[::-1])
    tokens, targets = ids(*rows), ids(*([*row[1:], 5] for row in rows))
    state = kept.init_cache(2, 9)
    mask = masks.causal(mx.ones((2, 8)), state["lengths"], 9)

    def loss(lora: Params) -> mx.array:
        logits = kept.forward({**base, **lora}, tokens, mask, state)[0]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        return -mx.mean(mx.take_along_axis(logprobs, targets[..., None], axis=-1))

    step = mx.compile(mx.value_and_grad(loss))
    losses = []
    for _ in range(30):
        value, gradients = step(trained)
        assert list(gradients) == list(trained)
        trained = {name: array - 0.5 * gradients[name] for name, array in trained.items()}
        mx.eval(trained)
        losses.append(value.item())
    assert losses[-1] < 0.5 * losses[0]
    for name, array in base.items():
        np.testing.assert_array_equal(to_numpy(array), before[name])
    tuned = kept.with_params({**base, **trained})
    assert relative_error(logits_of(tuned), logits_of(model)) > 0.1


def test_new_adapters_are_the_same_for_the_same_seed():
    model = model_of("float32")
    one, same, other = (adapters.init_adapter(model, 2, seed=seed) for seed in (0, 0, 1))
    assert len(one.changes) == 14  # every matrix but the embedding and the last projection
    for name, change in one.changes.items():
        assert mx.array_equal(change.a, same.changes[name].a)
        assert not mx.array_equal(change.a, other.changes[name].a)
    with pytest.raises(ParamsError, match="no matrix that can be adapted is called nose"):
        adapters.init_adapter(model, 2, ["q_proj", "nose"])
    with pytest.raises(ParamsError, match="rank"):
        adapters.init_adapter(model, 0)


def test_errors_name_matrices_in_order() -> None:
    change = adapters.Change(mx.zeros((1, 3)), mx.zeros((5, 1)))
    names = [f"model.layers.{i}.self_attn.q_proj" for i in (1, 0)]
    with pytest.raises(ParamsError, match=r"base: model\.layers\.0.*; model\.layers\.1"):
        adapters.fuse(model_of("float32"), Adapter("other", dict.fromkeys(names, change)))
