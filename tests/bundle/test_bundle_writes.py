"""No call of an exported function writes outside its own row, whatever the lengths say."""

from __future__ import annotations

from collections.abc import Iterator

from funcrt import sampling
from funcrt.buckets import BucketPlan
from funcrt.bundle import Bundle, export
from funcrt.cache import CacheState
from tests.bundle.test_bundle_caches import BITS
from tests.bundle.test_bundle_caches import make as make_packed
from tests.cache_calls import model_of
from tests.helpers import ids, random_tokens
from tests.toy_families import registered

import mlx.core as mx
import pytest


@pytest.fixture(scope="module", params=["full", "ring", "kv8", "toy_latent", "toy_hybrid"])
def writable(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bundle]:
    """A bundle of every kind of cache that has slots."""
    kind: str = request.param
    folder = tmp_path_factory.mktemp("writes") / "out"
    plan = BucketPlan(batch=2, tokens=8, capacity=32)
    with registered():
        model = model_of(kind) if kind.startswith("toy") else make_packed(kind)
        yield export(model, folder, plan, kv_bits=BITS.get(kind))


def ragged(bundle: Bundle, lengths: list[int]) -> CacheState:
    """A state whose rows say that they hold so many tokens."""
    tokens = mx.array([random_tokens(8), random_tokens(8, 1)], mx.int32) % bundle.vocab_size
    state = bundle.init_cache(2, bundle.plan.capacity[0])
    _, state = bundle.functions.prefill(tokens, mx.ones((2, 8)), state)
    mx.eval(state)
    return {**state, "lengths": mx.array(lengths, mx.int32)}


def call(bundle: Bundle, name: str, state: CacheState) -> tuple[mx.array, CacheState]:
    """Two tokens more for both rows, or one; logits of the second row, and the state."""
    functions, settings = bundle.functions, sampling.make_settings(2, bundle.vocab_size)
    slots = mx.arange(bundle.plan.capacity[0])
    token, active = ids([5], [7])[:, 0], mx.array([True, True])
    tokens, valid = ids([5] * 8, [7] * 8), mx.array([[1, 1] + [0] * 6] * 2)
    block = mx.tril(mx.ones((8, 8)))[None] * valid[:, :, None] * valid[:, None]
    mask = slots <= state["lengths"][:, None, None, None] + mx.arange(8)[:, None]
    match name:
        case "decode":
            made, state = functions.decode(token, active, settings, state)
            logits = made.logits
        case "decode_greedy":
            made, state = functions.decode_greedy(token, active, state)
            logits = made.logits
        case "verify":
            made, state = functions.verify(tokens, valid, settings, state)
            logits = made.logits
        case "verify_greedy":
            made, state = functions.verify_greedy(tokens, valid, state)
            logits = made.logits
        case "prefill":
            logits, state = functions.prefill(tokens, valid, state)
        case "prefill_block":
            logits, state = functions.prefill_block(tokens, block, state)
        case _:
            logits, state = functions.forward(tokens, mask & (valid != 0)[:, None, :, None], state)
            logits = logits[:, :2]
    mx.eval(logits, state)
    return logits[1], state


@pytest.mark.parametrize(
    "name",
    ["forward", "prefill", "prefill_block", "decode", "decode_greedy", "verify", "verify_greedy"],
)
def test_writes_stay_inside(writable: Bundle, name: str) -> None:
    """MLX checks no index: what is out of range would land in the next head, row or array."""
    size = writable.plan.capacity[0]
    expected, before = call(writable, name, ragged(writable, [8, 8]))
    most = 2**31 - 1
    for length in [size - 2, size - 1, size, size + 1, 2**30, most, -1, -size, -(2**30), -most - 1]:
        logits, after = call(writable, name, ragged(writable, [length, 8]))
        assert mx.array_equal(logits, expected).item(), length
        for key, array in after.items():
            assert mx.array_equal(array[1], before[key][1]).item(), (length, key)


@pytest.mark.parametrize("name", ["prefill", "decode", "verify_greedy"])
def test_what_does_not_fit_goes_to_the_scratch_slot(bundle: Bundle, name: str) -> None:
    for length in (15, 16, 17, 2**30):
        held = ragged(bundle, [length, 8])
        _, after = call(bundle, name, held)
        for key, array in after.items():
            if key != "lengths":
                assert mx.array_equal(array[0, :, :15], held[key][0, :, :15]).item(), (length, key)
