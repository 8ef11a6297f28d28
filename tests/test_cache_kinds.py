"""Latent and recurrent caches against oracles; gradients and exports of every kind."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funcrt import BucketPlan, Engine, flatten, masks
from funcrt import cache as caches
from funcrt.cache import FULL, CacheState, state_size
from funcrt.errors import CacheError, InputError
from funcrt.model import Model
from tests.cache_calls import MOST, feed, model_of, tokens_of
from tests.cache_histories import poison
from tests.helpers import TOLERANCE, Array, assert_same, ids, relative_error, to_numpy
from tests.toy_families import LAYERS, oracle, registered

import mlx.core as mx
import numpy as np
import pytest

RECURRENT = ["toy_hybrid", "toy_recurrent"]


@pytest.fixture(scope="module", autouse=True)
def _families() -> Iterator[None]:
    with registered():
        yield


# --- the toy families compute what they say -------------------------------------------------------


@pytest.mark.parametrize("sizes", [[20], [7, 1, 0, 12]], ids=str)
@pytest.mark.parametrize("model_type", LAYERS)
def test_toy_families_match_their_oracles(model_type, sizes):
    model, tokens = model_of(model_type), tokens_of(20)
    state = poison(model.init_cache(1, 24))
    pieces, start = [], 0
    for size in sizes:
        logits, state = feed(model, state, [tokens[start : start + size]], width=max(size, 2))
        pieces.append(to_numpy(logits[0, :size]))
        start += size
    assert relative_error(np.concatenate(pieces), oracle(model, tokens)) <= TOLERANCE


def test_latent_attention_runs_token_trees():
    model, tokens = model_of("toy_latent"), tokens_of(9)
    _, state = feed(model, model.init_cache(1, 16), [tokens[:5]])
    parents = mx.array([[-1, 0, 0, 1]])
    mask, positions = masks.from_tree(parents, state["lengths"], 16)
    logits, state = model.forward(model.params, ids(tokens[5:]), mask, state, positions)
    visible = np.tril(np.ones((9, 9)))
    visible[7, 6] = visible[8, 7] = 0  # siblings
    assert relative_error(logits[0], oracle(model, tokens, visible)[5:]) <= TOLERANCE
    kept = caches.keep(state, mx.array([[5, 7]]))
    logits, _ = feed(model, kept, [[3]])
    text = [*tokens[:6], tokens[7], 3]
    assert relative_error(logits[0], oracle(model, text)[-1:]) <= TOLERANCE


# --- recurrent ------------------------------------------------------------------------------------


def recurrent_arrays(state: CacheState, row: int) -> dict[str, Array]:
    return {
        name: to_numpy(array)[row]
        for name, array in state.items()
        if caches.kind_of(name) in ("row", "recurrent")
    }


def assert_same_row(ours: CacheState, row: int, theirs: CacheState, other: int) -> None:
    expected = recurrent_arrays(theirs, other)
    assert len(expected) >= 3
    for name, array in recurrent_arrays(ours, row).items():
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_padding_and_idling_leave_a_recurrent_state_exactly(model_type):
    model, tokens = model_of(model_type), tokens_of(9)
    states = []
    for side in ("left", "right"):
        _, state = feed(model, model.init_cache(2, 24), [tokens[:4], []], side, width=6)
        before = recurrent_arrays(state, 0)
        _, state = feed(model, state, [[], tokens[:2]], side, width=6)  # row 0 idles
        for name, array in recurrent_arrays(state, 0).items():
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        _, state = feed(model, state, [tokens[4:9], tokens[2:3]], side, width=6)
        states.append(state)
    for row in (0, 1):
        assert_same_row(states[0], row, states[1], row)
    _, alone = feed(model, model.init_cache(2, 24), [tokens[:4], []], width=6)
    _, alone = feed(model, alone, [tokens[4:9], []], width=6)
    assert_same_row(states[0], 0, alone, 0)


@pytest.mark.parametrize("model_type", RECURRENT)
def test_what_stands_at_padding_does_not_matter(model_type):
    model = model_of(model_type)
    valid = mx.array([[0, 1, 0, 1, 1, 0], [0] * 6])
    results = []
    for filler in (0, 63):
        tokens = mx.where(valid != 0, ids([1, 2, 3, 4, 5, 6], [0] * 6), filler)
        state = model.init_cache(2, 24)
        mask = masks.causal(valid, state["lengths"], state_size(state)[1])
        results.append(model.forward(model.params, tokens, mask, state)[1])
    assert_same(results[0], results[1])
    for name, array in results[0].items():
        assert not to_numpy(array)[1].any() or caches.kind_of(name) == "full"


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_row_joins_a_running_batch_as_it_was_alone(model_type):
    model, tokens = model_of(model_type), tokens_of(12)
    _, alone = feed(model, model.init_cache(1, 24), [tokens[:6]], width=6)
    _, batch = feed(model, model.init_cache(3, 24), [tokens[:2], tokens[1:5], []], width=6)
    joined = caches.insert(batch, 2, alone, 0)
    assert_same_row(joined, 2, alone, 0)
    assert_same_row(joined, 1, batch, 1)
    _, joined = feed(model, joined, [[], tokens[5:6], tokens[6:]], "left", width=6)
    logits, alone = feed(model, alone, [tokens[6:]], width=6)
    for name, array in recurrent_arrays(joined, 2).items():
        assert relative_error(array, recurrent_arrays(alone, 0)[name]) <= TOLERANCE
    assert relative_error(logits[0], oracle(model, tokens)[6:]) <= TOLERANCE


@pytest.mark.parametrize("model_type", RECURRENT)
def test_recurrent_layers_refuse_positions_even_when_traced(model_type):
    model = model_of(model_type)
    state = model.init_cache(1, 8)
    mask = masks.causal(mx.ones((1, 3)), state["lengths"], state_size(state)[1])
    positions = ids([0, 1, 2])
    for forward in (model.forward, mx.compile(model.forward)):
        with pytest.raises(InputError, match=r"leave positions out.*snapshot"):
            forward(model.params, ids([1, 2, 3]), mask, state, positions)


def test_recurrent_layers_refuse_masks_that_are_not_causal():
    model = model_of("toy_hybrid")
    logits, state = model([[5, 6, 7]])
    causal = masks.causal(mx.ones((1, 3)), state["lengths"], 256)
    slots = mx.arange(256)
    tree, _ = masks.from_tree(mx.array([[-1, 0, 0]]), state["lengths"], 256)
    ahead = mx.where(slots == 5, True, causal)  # token 3 sees token 5
    for mask in (tree, ahead, causal & (slots != 1)):
        with pytest.raises(InputError, match=r"causal masks with padding only.*snapshot"):
            model([[1, 2, 3]], mask, state)
    expected, _ = model([[1, 2, 3]], cache=state)
    # What nothing has written is invisible anyway, so a mask may show all of it.
    for mask in (causal, causal | (slots > 5), mx.where(causal, 0.0, -mx.inf)):
        logits, _ = model([[1, 2, 3]], mask, state)
        np.testing.assert_array_equal(to_numpy(logits), to_numpy(expected))


@pytest.mark.parametrize("model_type", RECURRENT)
def test_a_recurrent_state_goes_back_by_snapshot_only(model_type):
    model, tokens = model_of(model_type), tokens_of(12)
    _, state = feed(model, model.init_cache(2, 24), [tokens[:5], tokens[2:5]], width=6)
    saved = caches.snapshot(state)
    guesses = [tokens[5:9], tokens[7:11]]
    _, state = feed(model, state, guesses, width=6)
    assert not caches.can_trim(state, [2, 0]).item()
    assert caches.can_trim(state, 0).item()
    with pytest.raises(CacheError, match=r"recurrent state.*snapshot"):
        caches.trim(state, [2, 0])
    with pytest.raises(CacheError, match="recurrent"):
        caches.keep(state, mx.array([[5], [3]]))
    # Two guesses of one row and none of the other are accepted: the same call, another mask.
    state = caches.restore(state, saved)
    accepted = mx.array([[1, 1, 0, 0, 0, 0], [0] * 6])
    padded = ids(*([*row, 0, 0] for row in guesses))
    mask = masks.causal(accepted, state["lengths"], state_size(state)[1])
    _, state = model.forward(model.params, padded, mask, state)
    _, fresh = feed(model, model.init_cache(2, 24), [tokens[:5], tokens[2:5]], width=6)
    _, fresh = feed(model, fresh, [tokens[5:7], []], width=6)
    for row in (0, 1):
        assert_same_row(state, row, fresh, row)
    logits, _ = feed(model, state, [[9], [9]])
    for row, text in enumerate([[*tokens[:7], 9], [*tokens[2:5], 9]]):
        assert relative_error(logits[row], oracle(model, text)[-1:]) <= TOLERANCE


def test_a_model_without_slots_takes_text_of_any_length():
    model, tokens = model_of("toy_recurrent"), tokens_of(700)
    logits, state = model([tokens[:400]])
    assert state_size(state) == (1, 1)
    assert not any("S" in entry.shape for entry in model.cache_spec(FULL))
    more, state = model([tokens[400:]], cache=state)
    assert state["lengths"].tolist() == [700]
    assert_same(caches.grow(state, 64), state)
    expected = oracle(model, tokens)
    ours = np.concatenate([to_numpy(logits[0]), to_numpy(more[0])])
    assert relative_error(ours, expected) <= TOLERANCE


@pytest.mark.parametrize("model_type", RECURRENT)
def test_engine_reuses_the_rows_of_a_recurrent_model(model_type):
    model = model_of(model_type)
    prompts = [tokens_of(count, 3) for count in (9, 2, 17, 1, 5)]
    engine = Engine(model, BucketPlan(batch=2, tokens=4, capacity=64))
    for prompt, completion in zip(prompts, engine.generate(prompts, max_tokens=12), strict=True):
        text = [*prompt, *completion.tokens]
        greedy = oracle(model, text).argmax(-1)[len(prompt) - 1 : -1]
        assert greedy.tolist() == completion.tokens


def test_compiled_recurrent_layers_refuse_masks_that_are_not_causal():
    model = model_of("toy_hybrid")
    compiled = model.compiled(BucketPlan(batch=1, tokens=3, capacity=8), eager=True)
    tokens, state = ids([1, 2, 3]), compiled.init_cache(1, 8)
    causal, tree = mx.tril(mx.ones((3, 3))) != 0, mx.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]]) != 0
    compiled.prefill_block(tokens, causal[None], state)
    compiled.forward(tokens, masks.from_block(causal, state["lengths"], 8), state)
    with pytest.raises(InputError, match="causal masks with padding only"):
        compiled.prefill_block(tokens, tree[None], state)
    with pytest.raises(InputError, match="causal masks with padding only"):
        compiled.forward(tokens, masks.from_block(tree, state["lengths"], 8), state)


# --- every kind -----------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[str, dict[str, int]]] = {
    "full": ("llama", {}),
    "window": ("mistral", {}),
    "ring": ("mistral", {"max_tokens": MOST}),
    "kv8": ("llama", {"kv_bits": 8}),
    "kv4": ("llama", {"kv_bits": 4}),
    "latent": ("toy_latent", {}),
    "hybrid": ("toy_hybrid", {}),
    "hybrid8": ("toy_hybrid", {"kv_bits": 8}),
    "recurrent": ("toy_recurrent", {}),
}


@pytest.mark.parametrize("name", sorted(set(LAYOUTS) - {"recurrent"}))
def test_a_step_writes_in_place(name):
    model_type, layout = LAYOUTS[name]
    layout = {key: 4096 if key == "max_tokens" else value for key, value in layout.items()}
    model = model_of(model_type)
    state = model.init_cache(4, 8192, **layout)
    size = sum(array.nbytes for array in state.values())
    mask = masks.causal(mx.ones((4, 1)), state["lengths"], 8192)
    mx.eval(state, mask, model.params)
    _, new = model.forward(model.params, mx.zeros((4, 1), mx.int32), mask, state)
    state.clear()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(new)
    assert mx.get_peak_memory() - before < 0.4 * size


# --- gradients ------------------------------------------------------------------------------------


def loss_of(model: Model, **layout: Any) -> Any:
    state = model.init_cache(2, 12, **layout)
    _, state = feed(model, state, [tokens_of(3), []], width=4)

    def loss(params: dict[str, mx.array]) -> mx.array:
        valid = mx.array([[0, 1, 1, 1], [1, 1, 0, 0]])
        mask = masks.causal(valid, state["lengths"], state_size(state)[1])
        logits, _ = model.forward(params, ids([1, 2, 3, 4], [5, 6, 7, 8]), mask, state)
        return mx.sum(logits[0, 1:]) + mx.sum(logits[1, :2] ** 2)

    return loss


@pytest.mark.parametrize(
    ("model_type", "layout"), [*((t, {}) for t in LAYERS), ("mistral", {"max_tokens": 4})], ids=str
)
def test_gradients_pass_through_caches_that_are_not_packed(model_type, layout):
    model = model_of(model_type)
    loss = loss_of(model, **layout)
    gradients = mx.grad(loss)(model.params)
    assert all(np.isfinite(to_numpy(array)).all() for array in gradients.values())
    for name, array in model.params.items():
        slope = to_numpy(gradients[name])
        spot = np.unravel_index(np.abs(slope).argmax(), slope.shape)
        nudge = np.zeros(slope.shape, np.float32)
        nudge[spot] = 1e-2
        high, low = (
            loss({**model.params, name: array + sign * mx.array(nudge)}) for sign in (1, -1)
        )
        measured = (high - low).item() / 2e-2
        assert abs(measured - slope[spot]) <= 0.02 * abs(slope[spot]) + 1e-2, name


def test_gradients_through_a_packed_cache_are_refused():
    model = model_of("llama")
    with pytest.raises(RuntimeError, match="no gradient wrt the quantized weights"):
        mx.eval(mx.grad(loss_of(model, kv_bits=8))(model.params))


# --- export ---------------------------------------------------------------------------------------

REPLAY = """
import sys, mlx.core as mx
for name in sys.argv[2:]:
    inputs = mx.load(f"{sys.argv[1]}/{name}.safetensors")
    params = [inputs[f"p{i}"] for i in range(sum(k[0] == "p" for k in inputs))]
    state = [inputs[f"s{i}"] for i in range(sum(k[0] == "s" for k in inputs))]
    run = mx.import_function(f"{sys.argv[1]}/{name}.mlxfn")
    out = {}
    for call in "01":
        logits, *state = run(*params, inputs[f"t{call}"], inputs[f"m{call}"], *state)
        out[f"logits{call}"] = logits
    out |= {f"s{i}": array for i, array in enumerate(state)}
    mx.save_safetensors(f"{sys.argv[1]}/{name}-out.safetensors", out)
assert not {m for m in sys.modules if m.startswith("funcrt")}
"""


def test_every_kind_runs_in_another_process(tmp_path: Path):
    """Exported over plain MLX; two calls, ragged, one row idle in the second."""
    expected = {}
    for name, (model_type, layout) in LAYOUTS.items():
        model = model_of(model_type)
        state = model.init_cache(2, 16, **layout)
        capacity = state_size(state)[1]
        valid = [mx.array([[1] * 6, [0, 0, 1, 0, 1, 1]]), mx.array([[0] * 6, [1, 1, 1, 1, 0, 0]])]
        tokens = [ids(tokens_of(6, i), tokens_of(6, i + 1)) for i in range(2)]
        lengths = [state["lengths"], ids([6, 3])[0]]
        masking = [masks.causal(v, n, capacity) for v, n in zip(valid, lengths, strict=True)]
        flat, _, outputs = flatten(model.forward, model.params, tokens[0], masking[0], state)
        arrays = [*model.params.values(), tokens[0], masking[0], *state.values()]
        mx.export_function(str(tmp_path / f"{name}.mlxfn"), flat, *arrays)
        assert outputs[1:] == [f"cache_state.{part}" for part in state]
        saved = {f"p{i}": array for i, array in enumerate(model.params.values())}
        saved |= {f"s{i}": array for i, array in enumerate(state.values())}
        for i in range(2):
            saved |= {f"t{i}": tokens[i], f"m{i}": masking[i]}
        mx.save_safetensors(str(tmp_path / f"{name}.safetensors"), saved)
        results = []
        for i in range(2):
            logits, state = model.forward(model.params, tokens[i], masking[i], state)
            results.append(to_numpy(logits)[np.array(valid[i]) != 0])
        expected[name] = (results, valid, state)
    command = [sys.executable, "-c", REPLAY, str(tmp_path), *LAYOUTS]
    subprocess.run(command, check=True, timeout=120)
    for name, (results, valid, state) in expected.items():
        out: Any = mx.load(str(tmp_path / f"{name}-out.safetensors"))
        for i in range(2):
            ours = to_numpy(out[f"logits{i}"])[np.array(valid[i]) != 0]
            assert relative_error(ours, results[i]) <= TOLERANCE, name
        assert out["s0"].tolist() == state["lengths"].tolist() == [6, 7]
