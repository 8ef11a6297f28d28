"""Guessing the next tokens of texts, for `verify` to judge in one call of the model.

A wrong guess costs time, never quality: `funcrt.guesses` accepts exactly what plain decoding would
have chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from funcrt import cache
from funcrt.buckets import BucketPlan, choose_overhead
from funcrt.calling import CallForm
from funcrt.engine.controls import Controls, is_greedy
from funcrt.engine.grouping import most_places
from funcrt.engine.prefixes import shared
from funcrt.engine.request import Request
from funcrt.engine.rows import Rows, pad
from funcrt.errors import CapacityError, InputError
from funcrt.footprint import Footprint

import mlx.core as mx

LARGEST_GUESS = 15
"""Most guesses in one call: `verify` takes them and the token before them."""


class Drafter(ABC):
    """Guesses what comes next in each of several texts.

    Attributes:
        texts: those that may ask it.
        catches_up: it reads texts piece by piece when it is asked, so that it should be.
    """

    catches_up = False

    def __init__(self) -> None:
        self.texts: set[Request] = set()

    @abstractmethod
    def guess(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """At most so many next tokens of each text; those without a guess are left out."""

    @abstractmethod
    def forget(self, request: Request) -> None:
        """The text has ended."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew: what it holds is not known any more."""


class NgramDrafter(Drafter):
    """Guesses that a text goes on as it did the last time that its latest tokens stood there.

    Saxena, "Prompt Lookup Decoding", 2023. Costs a few dictionary look-ups per token.

    Args:
        longest: most tokens that have to match; fewer are tried when more do not.
        shortest: fewest.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        super().__init__()
        self._sizes = range(longest, shortest - 1, -1)
        # Of each text: the places that are indexed, and where each n-gram ended last.
        self._indexed: dict[Request, tuple[int, dict[tuple[int, ...], int]]] = {}

    def guess(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """What followed the latest n-gram of each text where it stood before."""
        guesses = {}
        for request, most in wanted.items():
            sequence = request.sequence
            start = self._find(request, sequence)
            if start is not None:
                # A text that has begun to repeat itself goes on repeating.
                period = len(sequence) - start
                guesses[request] = [sequence[start + i % period] for i in range(most)]
        return guesses

    def forget(self, request: Request) -> None:
        """Drop the index of a text."""
        self._indexed.pop(request, None)

    def reset(self) -> None:
        """Drop all."""
        self._indexed.clear()

    def _find(self, request: Request, sequence: list[int]) -> int | None:
        """The place after the latest earlier occurrence of the text's end."""
        done, index = self._indexed.get(request, (0, {}))
        count = len(sequence)
        # Up to the last place only: the end must not be found as its own earlier occurrence.
        for end in range(done + 1, count):
            for size in self._sizes:
                if size <= end:
                    index[tuple(sequence[end - size : end])] = end
        self._indexed[request] = (max(done, count - 1), index)
        for size in self._sizes:
            found = index.get(tuple(sequence[count - size :])) if size < count else None
            if found is not None:
                return found
        return None


class ModelDrafter(Drafter):
    """Guesses with a smaller model of the same vocabulary, all texts at once.

    It draws with the settings and the noise of the text that it guesses for, so that it is right as
    often as the two distributions allow. Its cache has a row for each text, which catches up with
    what was accepted and gives back what was not.

    Args:
        model: the smaller model.
        plan: the shapes of its calls. A bundle that was exported for others uses its own; texts
            that it has no room for are not guessed.

    Attributes:
        compiled: its step functions.
        footprint: the memory that it takes.

    Raises:
        InputError: a model whose cache cannot go back: recurrent layers.
    """

    catches_up = True

    def __init__(self, model: CallForm, plan: BucketPlan) -> None:
        super().__init__()
        try:
            self.compiled = model.compiled(plan)
        except CapacityError:
            self.compiled = model.compiled()
        spec = self.compiled.cache_spec
        self.footprint = Footprint.of(model, spec)
        if any(entry.kind == "recurrent" for entry in spec):
            raise InputError(
                "speculate: a draft model with recurrent layers cannot take guesses back: use one "
                'with attention only, or "ngram"'
            )
        self._rows = Rows(spec, self.compiled.plan)
        self._held: dict[Request, list[int]] = {}  # the tokens in each text's row
        self._controls = Controls(model.vocab_size)
        longest = self.compiled.plan.tokens[-1]
        has_rings = any(entry.kind == "ring" for entry in spec)
        self._most = longest if has_rings else LARGEST_GUESS  # what can be taken back

    def guess(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """So many tokens of each text that its cache has room for.

        At most one chunk of texts that are behind is read first: nobody waits for a whole prompt,
        and what is still behind then is not guessed yet.
        """
        wanted = {request: min(most, self._most) for request, most in wanted.items()}
        wanted = {request: most for request, most in wanted.items() if self._seat(request, most)}
        if not wanted:
            return {}
        needs = [len(request.sequence) + most for request, most in wanted.items()]
        self._rows.fit(len(self._held), max(*needs, *map(len, self._held.values())))
        self._take_back(wanted)
        behind = max(self._pending(request) for request in wanted) - 1
        if behind:
            self._catch_up(wanted, self._choose_width(behind))
        ready = {r: most for r, most in wanted.items() if self._pending(r) == 1}
        return self._draw(ready) if ready else {}

    def _choose_width(self, behind: int) -> int:
        """T of a call that reads what texts are behind: no more places than other calls have."""
        plan, overhead = self.compiled.plan, choose_overhead()
        most = most_places(plan) // self._rows.batch
        return min(plan.choose_chunk(behind, overhead), max([t for t in plan.tokens if t <= most],
                   default=plan.tokens[0]))  # fmt: skip

    def reset(self) -> None:
        """Begin with an empty cache."""
        self._rows = Rows(self.compiled.cache_spec, self.compiled.plan)
        self._held.clear()
        self._controls.forget()

    def forget(self, request: Request) -> None:
        """Leave the text's row to another one."""
        if self._held.pop(request, None) is not None:
            self._rows.release(self._rows.requests.index(request))

    def _seat(self, request: Request, most: int) -> bool:
        """Whether there is a row for a text, and room in it."""
        plan = self.compiled.plan
        tokens = len(request.sequence) + most
        if tokens > plan.capacity[-1] - 1:
            return False
        if request not in self._held:
            if len(self._held) == plan.batch[-1]:
                return False
            longest = max([tokens, *map(len, self._held.values())])
            self._rows.fit(len(self._held) + 1, longest)
            self._rows.seat(request)
            self._held[request] = []
        return True

    def _pending(self, request: Request) -> int:
        return len(request.sequence) - len(self._held[request])

    def _take_back(self, wanted: Mapping[Request, int]) -> None:
        """Trim the rows to what they have in common with their texts, but for the last token."""
        counts = [0] * self._rows.batch
        for row, request in self._rows.seated.items():
            if request in wanted:
                held = self._held[request]
                common = min(shared(held, request.sequence), len(request.sequence) - 1)
                counts[row] = len(held) - common
                del held[common:]
        if any(counts):
            assert self._rows.state is not None
            self._rows.state = cache.trim(self._rows.state, mx.array(counts, dtype=mx.int32))

    def _catch_up(self, wanted: Mapping[Request, int], width: int) -> None:
        """One chunk of every text, but for its last token."""
        chunks, is_first = {}, not any(self._held.values())
        for row, request in self._rows.seated.items():
            if request in wanted:
                begin = len(self._held[request])
                chunks[row] = request.sequence[
                    begin : min(begin + width, len(request.sequence) - 1)
                ]
                self._held[request] += chunks[row]
        tokens, valid = pad(chunks, self._rows.batch, width)
        assert self._rows.state is not None
        _, self._rows.state = self.compiled.prefill(tokens, valid, self._rows.state, first=is_first)
        mx.eval(self._rows.state)

    def _draw(self, wanted: Mapping[Request, int]) -> dict[Request, list[int]]:
        """Decode from the last token of every text."""
        guesses: dict[Request, list[int]] = {request: [] for request in wanted}
        greedy = is_greedy(list(wanted))
        self._controls.forget()  # histories move on between calls
        for step in range(max(wanted.values())):
            token, active = [0] * self._rows.batch, [False] * self._rows.batch
            for row, request in self._rows.seated.items():
                if step < wanted.get(request, 0):
                    token[row] = (request.sequence[-1:] + guesses[request])[-1]
                    active[row] = True
                    self._held[request].append(token[row])
            state = self._rows.state
            assert state is not None
            self._rows.state = None
            ids, real = mx.array(token, dtype=mx.int32), mx.array(active)
            if greedy:
                sampled, state = self.compiled.decode_greedy(ids, real, state)
            else:
                settings = self._controls.of(self._rows.requests)
                sampled, state = self.compiled.decode(ids, real, settings, state)
                self._controls.advance(sampled.history)
            mx.eval(sampled.tokens, state)
            self._rows.state = state
            chosen: Any = sampled.tokens.tolist()
            for row, request in self._rows.seated.items():
                if active[row]:
                    guesses[request].append(chosen[row])
        return guesses


def check_draft(model: CallForm, draft: CallForm) -> None:
    """Raise InputError unless a draft model's ids mean what the model's mean."""
    if draft.vocab_size != model.vocab_size:
        raise InputError(
            f"speculate: the draft model has {draft.vocab_size} ids, the model {model.vocab_size}: "
            "use one with the same tokenizer"
        )
    if model.tokenizer is None or draft.tokenizer is None:
        return
    if draft.tokenizer.vocabulary != model.tokenizer.vocabulary:
        raise InputError("speculate: the draft model has another tokenizer than the model")
