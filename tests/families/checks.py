"""The checklist that every family runs: one function per column, measured against what is allowed.

Each takes a case and returns a `Result`, or raises what went wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from funcrt import BucketPlan
from funcrt.compiled import Compiled
from funcrt.model import Model
from funcrt.packing import GROUP_SIZES, Transposed
from funcrt.params import Params
from tests.families.against_mlx_lm import mlx_lm
from tests.families.batches import ROWS, held, run_alone, run_together, texts
from tests.families.cases import Case, causal, run_plain
from tests.families.configs import unknown_config
from tests.families.exports import exported
from tests.families.features import features
from tests.families.gradients import gradients
from tests.families.half import bfloat16, float16
from tests.families.results import CAPACITY, TOLERANCE, WIDTH, Result, worst
from tests.helpers import Array, relative_error, run_in_pieces, to_numpy

import mlx.core as mx
import numpy as np

PLAN = BucketPlan(batch=(2,), tokens=(WIDTH,), capacity=(CAPACITY,))
PROMPT, STEPS = 21, 20  # of prefill and decode: longer than the windows together
BITS, GROUP = 4, GROUP_SIZES[0]


def golden(case: Case) -> Result:
    """The prompt against transformers: whole, with prepared weights, and through every cache."""
    prepared = run_plain(case.model, case.prompt, case.model.prepared)
    results = [_against_golden(case, one, chunked=False) for one in (case.whole, prepared)]
    chunked = case.golden.chunks is not None
    results += [_against_golden(case, logits, chunked=chunked) for logits in case.in_pieces()]
    return worst(results)


def _against_golden(case: Case, logits: mx.array, *, chunked: bool) -> Result:
    expected, told = (case.golden.chunked_logits if chunked else case.golden.logits), case.golden
    assert expected is not None
    error = relative_error(logits[told.positions], expected)
    if not chunked:  # argmax is that of the whole prompt
        wrong = np.count_nonzero(np.array(mx.argmax(logits, axis=-1) != told.argmax))
        if wrong:
            return Result(error if error > TOLERANCE else 1.0, TOLERANCE, f"{wrong} other tokens")
    return Result(error, TOLERANCE)


def cached(case: Case) -> Result:
    """A prefill and single steps equal one uncached call."""
    text = case.tokens(PROMPT + STEPS, 1)
    expected = run_plain(case.model, text)
    sizes = [PROMPT, *[1] * STEPS]
    results = []
    for layout in case.layouts(PROMPT):
        state = case.model.init_cache(1, CAPACITY, max_tokens=layout.max_tokens)
        logits = run_in_pieces(case.model, mx.array([text], dtype=mx.int32), sizes, state)
        results.append(Result(relative_error(logits, expected), TOLERANCE))
    return worst(results)


def chunked(case: Case) -> Result:
    """A long prompt in pieces equals the same in one call, or transformers' own in such pieces."""
    if case.golden.chunks is not None:  # there the way of feeding matters, to transformers too
        return worst([_against_golden(case, one, chunked=True) for one in case.in_pieces()])
    errors = [relative_error(logits, case.whole) for logits in case.in_pieces()]
    return Result(max(errors), TOLERANCE)


def ragged_left(case: Case) -> Result:
    """Rows of one batch, padded on the left, are bitwise what each is alone in calls like these.

    And they are what one call without a cache or any padding gives.
    """
    return _ragged(case, left=True)


def ragged_right(case: Case) -> Result:
    """The same, padded on the right."""
    return _ragged(case, left=False)


def _ragged(case: Case, *, left: bool) -> Result:
    results, plain = [], [run_plain(case.model, text) for text in texts(case)]
    for layout in case.layouts():
        together = run_together(case, case.model, layout, left=left)
        for row in range(ROWS):
            error = relative_error(together.logits[row], plain[row])
            results.append(Result(error, TOLERANCE, f"row {row}, in one call"))
            alone = run_alone(case, case.model, layout, row)
            ours, theirs = held(together.state, row), held(alone.state, row)
            ours["logits"], theirs["logits"] = together.logits[row], alone.logits[0]
            for name, array in ours.items():
                moved = float(np.abs(array - theirs[name]).max(initial=0))
                results.append(Result(moved, 0.0, f"row {row}, {name}"))
    return worst(results)


# --- compiled -------------------------------------------------------------------------------------

Outputs = list[tuple[str, Array, Array]]  # function, logits, tokens


def compiled(case: Case) -> Result:
    """Compiled steps equal eager ones: logits, greedy tokens, lengths."""
    ours = _drive(case, case.model.compiled(PLAN))[0]
    theirs = _drive(case, case.model.compiled(PLAN, eager=True))[0]
    results = []
    for (name, logits, tokens), (_, expected, chosen) in zip(ours, theirs, strict=True):
        same = np.array_equal(tokens, chosen)
        note = name if same else f"{name}: other tokens"
        error = relative_error(logits, expected) if same else 1.0
        results.append(Result(error, TOLERANCE, note))
    return worst(results)


def traces(case: Case) -> Result:
    """Lengths, padding and ids never retrace: one trace for each function and shape."""
    functions = case.model.compiled(PLAN)
    used = _drive(case, functions)[1]
    extra = {name: count - 1 for name, count in functions.traces.items() if count != 1}
    missing = used - len(functions.traces)
    return Result(sum(map(abs, extra.values())) + abs(missing), 0.0, ", ".join(extra))


def _drive(case: Case, functions: Compiled) -> tuple[Outputs, int]:
    """Two padded calls of `forward` and greedy steps with an idle row; functions that were used."""
    state = functions.init_cache(2, CAPACITY)
    found: Outputs = []
    ids = np.array(case.tokens(4 * WIDTH, 2)).reshape(2, 2, WIDTH)
    for call, pads in enumerate(((3, 0), (0, WIDTH - 1))):
        valid = mx.array([[i >= pad for i in range(WIDTH)] for pad in pads])
        tokens = mx.array(ids[call], dtype=mx.int32)
        logits, state = functions.forward(tokens, causal(valid, state), state)
        real = to_numpy(logits)[np.array(valid)]
        found.append(("forward", real, real.argmax(-1)))
    token = mx.array(ids[0, :, 0], dtype=mx.int32)
    for active in ([True, True], [False, True], [True, True]):
        chosen, state = functions.decode_greedy(token, mx.array(active), state)
        token = mx.where(mx.array(active), chosen.tokens, token)
        assert chosen.logits is not None
        real = to_numpy(chosen.logits)[active]
        found.append(("decode_greedy", real, np.array(chosen.tokens)[active]))
    assert state["lengths"].tolist() == [15, 12], "lengths"
    return found, 2


# --- other weights, other code --------------------------------------------------------------------


def four_bit(case: Case) -> Result:
    """Every matrix packed in 4 bits: it runs, and is its own dense form, prepared or not."""
    params = pack(case.model)
    dense = [n for n, a in params.items() if _is_matrix(n, a)]
    assert not dense or case.name.startswith("llama-"), f"not packed: {dense}"  # F = 48 there
    packed = Model(case.model.config, params, family=case.model.family)
    text = texts(case)[0]
    expected = run_plain(packed.in_float32(), text)
    moved = relative_error(expected, run_plain(case.model, text))
    assert moved > 100 * TOLERANCE, "packing changed nothing"
    results = [
        Result(relative_error(run_plain(packed, text, params), expected), TOLERANCE, name)
        for name, params in (("packed", packed.params), ("prepared", packed.prepared))
    ]
    return worst(results)


def pack(model: Model) -> Params:
    """The weights with every matrix packed whose rows fill groups."""
    packed: Params = {}
    for name, array in model.params.items():
        base = name.removesuffix(".weight")
        flip = isinstance(model.spec[name], Transposed)
        rows = array.swapaxes(-1, -2) if flip else array
        if not _is_matrix(name, rows) or rows.shape[-1] % GROUP:
            packed[name] = array
            continue
        parts = mx.quantize(rows, group_size=GROUP, bits=BITS)
        for part, values in zip(("weight", "scales", "biases"), parts, strict=True):
            packed[f"{base}.{part}"] = values
    return packed


def _is_matrix(name: str, array: mx.array) -> bool:
    """Not the taps of a convolution, a bias of every expert, or packed."""
    wide = array.ndim > 1 and array.shape[-1] >= GROUP
    return wide and not name.endswith("bias") and array.dtype != mx.uint32


Check = Callable[[Case], Result]
CHECKS: dict[str, Check] = {
    check.__name__: check
    for check in (
        golden, features, cached, ragged_left, ragged_right, chunked, compiled, exported, float16,
        bfloat16, four_bit, gradients, traces, mlx_lm, unknown_config,
    )
}  # fmt: skip
