"""The README's promise: plain MLX is enough around the contract."""

from __future__ import annotations

from collections.abc import Callable

import funcrt
from funcrt.model import Model
from tests.helpers import POISON, TOLERANCE, ids, make_model, poison, random_tokens, relative_error

import mlx.core as mx
import pytest


@pytest.fixture(scope="module")
def model() -> Model:
    return make_model()


def test_compile(model):
    forward = mx.compile(model.forward)
    state = model.init_cache(batch=3, capacity=24)
    tokens = mx.array([[5, 3, 8, 0, 0, 0, 0, 0], [7, 1, 2, 9, 4, 6, 8, 8], [0] * 8])
    mask = funcrt.masks.causal(tokens != 0, state["lengths"], capacity=24)
    logits, state = forward(model.params, tokens, mask, state)

    expected, plain = model.forward(model.params, tokens, mask, model.init_cache(3, 24))
    assert relative_error(logits[0, :3], expected[0, :3]) <= TOLERANCE
    assert relative_error(logits[1], expected[1]) <= TOLERANCE
    assert list(state) == list(plain)
    assert state["lengths"].tolist() == [3, 8, 0]


def test_export(model, tmp_path):
    file = str(tmp_path / "forward.mlxfn")
    state = model.init_cache(batch=1, capacity=24)
    tokens = mx.array([[5, 3, 8]])
    mask = funcrt.masks.causal(mx.ones((1, 3)), state["lengths"], capacity=24)
    flat, inputs, outputs = funcrt.flatten(model.forward, model.params, tokens, mask, state)
    arrays = [*model.params.values(), tokens, mask, *state.values()]
    mx.export_function(file, flat, *arrays)
    logits, *rest = mx.import_function(file)(*arrays)

    expected, plain = model.forward(model.params, tokens, mask, state)
    assert relative_error(logits, expected) <= TOLERANCE
    named = dict(zip(outputs, (logits, *rest), strict=True))
    assert named["cache_state.lengths"].tolist() == [3]
    assert relative_error(named["cache_state.layers.1.keys"], plain["layers.1.keys"]) <= TOLERANCE
    assert len(inputs) == len(arrays)


def test_a_compiled_loop_traces_once_and_generates_the_same(model):
    """Twenty tokens: dicts in and out, the state passed on, other values at every step."""
    traces = 0

    def forward(*inputs):
        nonlocal traces
        traces += 1
        return model.forward(model.params, *inputs)

    def generate(run: Callable) -> list[int]:
        state, token, made = poison(model.init_cache(3, 24), POISON), 5, []
        for _ in range(20):
            mask = funcrt.masks.causal(mx.array([[1], [0], [1]]), state["lengths"], 24)
            logits, state = run(ids([token], [7], [0]), mask, state)
            token = mx.argmax(logits[0, 0]).item()
            made.append(token)
        assert state["lengths"].tolist() == [20, 0, 20]
        return made

    compiled = generate(mx.compile(forward))
    assert traces == 1
    assert compiled == generate(lambda *call: model.forward(model.params, *call))
    assert len(set(compiled)) > 5


def test_positions_are_a_trace_of_their_own(model):
    traces = 0

    def forward(*inputs):
        nonlocal traces
        traces += 1
        return model.forward(model.params, *inputs)

    compiled, tokens = mx.compile(forward), ids(*(random_tokens(8, row) for row in range(3)))
    state = model.init_cache(3, 24)
    mask = funcrt.masks.causal(mx.ones((3, 8)), state["lengths"], 24)
    for _ in range(2):
        compiled(tokens, mask, state)
        for stretch in (1, 3):
            positions = mx.broadcast_to(stretch * mx.arange(8), (3, 8))
            ours, _ = compiled(tokens, mask, state, positions)
            theirs, _ = model.forward(model.params, tokens, mask, state, positions)
            assert relative_error(ours, theirs) <= TOLERANCE
    assert traces == 2
