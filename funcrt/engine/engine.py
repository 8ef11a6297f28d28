"""`Engine`: what callers hold. It checks what it is given and leaves the rest to its thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from funcrt import streams
from funcrt.buckets import BucketPlan
from funcrt.calling import CallForm
from funcrt.engine.admission import Admission
from funcrt.engine.handle import Handle
from funcrt.engine.options import Options, Prompt, Prompts, Stops, Wish, read_wishes
from funcrt.engine.owner import Owner
from funcrt.engine.request import Chunk, Completion, Request
from funcrt.engine.scheduler import Scheduler
from funcrt.engine.speculative import Drafter, ModelDrafter, NgramDrafter, check_draft
from funcrt.engine.stats import OnStep, Stats
from funcrt.errors import EngineError, InputError
from funcrt.footprint import Footprint
from funcrt.steps import STEPS

if TYPE_CHECKING:
    from typing_extensions import Unpack

NGRAM = "ngram"


class Engine:
    """Generate for many requests at once with a model or a bundle.

    Requests join and leave the running batch at any step; every row is what it would be alone.
    One thread of the engine's own runs the model, all methods may be called from any thread.

    Args:
        model: anything that runs the contract.
        plan: buckets to use; None takes the bundle's, or `buckets.default_plan` of a model.
        memory_budget: most bytes for weights, cache states and one call; None takes most of what is
            free. What does not fit waits, what can never fit is refused.
        speculate: the default of the option: None, "ngram" (guess from the text itself), or a
            smaller model of the same vocabulary. Output is the same, but sooner.
        on_step: called with a `StepReport` after every call of the model, by the engine's thread;
            if it raises, this is logged and it is not called again.

    Raises:
        CapacityError: a bundle has not exported what `plan` asks for.
        InputError: a draft model of another vocabulary; a budget below 1.
        EngineError: a bundle, in a process that used MLX before it imported funcrt.
    """

    def __init__(
        self,
        model: CallForm,
        plan: BucketPlan | None = None,
        memory_budget: int | None = None,
        *,
        speculate: str | CallForm | None = None,
        on_step: OnStep | None = None,
    ) -> None:
        if memory_budget is not None and not _is_size(memory_budget):
            raise InputError(f"memory_budget: expected bytes, at least 1, got {memory_budget!r}")
        if not isinstance(model, CallForm):
            raise InputError(f"expected a model or a bundle, got {type(model).__name__}")
        if plan is not None and not isinstance(plan, BucketPlan):
            raise InputError(f"plan: expected a BucketPlan, got {type(plan).__name__}")
        if on_step is not None and not callable(on_step):
            raise InputError(f"on_step: expected a function, got {on_step!r}")
        self.model = model
        self.compiled = model.compiled(plan)
        if self.compiled.is_imported and not streams.is_reserved():
            raise EngineError(
                "an engine runs a bundle in a thread of its own, which MLX lets it only where "
                "funcrt was imported before MLX was used for the first time: import funcrt first"
            )
        footprint = Footprint.of(model, self.compiled.cache_spec)
        self._admission = Admission(footprint, self.compiled.plan, memory_budget)
        self._ends = frozenset(model.eos_token_ids)
        self._scheduler = Scheduler(self.compiled, self._admission, on_step)
        self._owner = Owner(self._scheduler, self.compiled.is_imported)
        self._drafters: dict[Any, Drafter] = {}
        self._making_drafter = threading.Lock()
        self._speculate = speculate
        self._choose_drafter(speculate)
        # Also at the interpreter's end: a thread must not be inside MLX then.
        weakref.finalize(self, self._owner.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def stats(self) -> Stats:
        """A copy of the counters; `later - earlier` is what happened between."""
        return self._owner.stats

    def generate(
        self,
        prompts: Prompts,
        *,
        stop: Stops = None,
        **options: Unpack[Options],
    ) -> list[Completion]:
        """Complete every prompt, one `Completion` each, in order; arguments as of `stream`."""
        wishes = self._read(prompts, stop, options)
        handles: list[Handle] = []
        try:
            handles += (self._submit(i, wish) for i, wish in enumerate(wishes))
            return [handle.result() for handle in handles]
        finally:
            _cancel(handles)

    def stream(
        self,
        prompts: Prompts,
        *,
        stop: Stops = None,
        **options: Unpack[Options],
    ) -> Iterator[Chunk]:
        """Yield every new token as it comes, for all prompts at once.

        Work begins with the first chunk that is asked for; closing the iterator cancels the rest.

        Args:
            prompts: strings, or lists of ids; one of them alone is a list of one.
            stop: strings that end a completion and are cut off; a list of lists has those of each
                prompt.
            **options: see `Options`; `max_tokens` is 128, everything else off, if not given. Draws
                depend on a prompt's own seed and positions, never on its neighbours.

        Raises:
            InputError: an empty prompt, ids out of range, options out of range or unknown.
            CapacityError: a prompt that no declared capacity or no memory holds.
            TextError: a string prompt or stop strings without a tokenizer.
            EngineError: the engine is closed.
        """
        return self._stream(self._read(prompts, stop, options))

    def submit(
        self,
        prompt: Prompt,
        *,
        stop: Stops = None,
        on_chunk: Callable[[Chunk], None] | None = None,
        **options: Unpack[Options],
    ) -> Handle:
        """Put one prompt in the queue and return at once; arguments and errors as of `stream`.

        Args:
            prompt: text or ids.
            stop: strings that end the completion and are cut off.
            on_chunk: called with every chunk by the engine's thread; if it raises, the request ends
                with that error.
            **options: one value each.
        """
        if on_chunk is not None and not callable(on_chunk):
            raise InputError(f"on_chunk: expected a function, got {on_chunk!r}")
        prompts = prompt if isinstance(prompt, (str, int)) else [prompt]  # a number is refused
        wishes = self._read(prompts, stop, options)
        return self._submit(0, wishes[0], on_chunk)

    def cancel(self, handle: Handle) -> None:
        """End a request where it is; nothing happens if it has ended."""
        self._owner.cancel(handle)

    def close(self) -> None:
        """Cancel what is under way and end the thread. May be called more than once."""
        self._owner.close()

    def _read(self, prompts: object, stop: object, options: Any) -> list[Wish]:
        options.setdefault("speculate", self._speculate)
        wishes = read_wishes(self.model, self.compiled.plan, prompts, stop, options)
        for wish in wishes:
            guesses = self._choose_drafter(wish.speculate) is not None
            self._admission.check(len(wish.prompt) + wish.limit - 1, guesses)
        return wishes

    def _choose_drafter(self, speculate: Any) -> Drafter | None:
        """The drafter that an option stands for; one for each model."""
        if speculate is None:
            return None
        if speculate != NGRAM and not isinstance(speculate, CallForm):
            raise InputError(f'speculate: expected None, "ngram" or a model, got {speculate!r}')
        plan = self.compiled.plan
        if not STEPS["verify"].choose_sizes(plan.tokens):
            raise InputError(
                "speculate: no declared T is between 2 and 16, the sizes of a call that verifies "
                f"guesses; declared: {', '.join(map(str, plan.tokens))}: add 4 or 8 to the plan's "
                "tokens (--tokens of funcrt export)"
            )
        if speculate == NGRAM:
            return self._drafters.setdefault(NGRAM, NgramDrafter())
        with self._making_drafter:
            if speculate not in self._drafters:
                self._drafters[speculate] = self._make_drafter(speculate)
        return self._drafters[speculate]

    def _make_drafter(self, draft: CallForm) -> Drafter:
        check_draft(self.model, draft)
        for other, drafter in list(self._drafters.items()):
            unused = not drafter.texts and other is not self._speculate
            if unused and isinstance(drafter, ModelDrafter):
                del self._drafters[other]
                self._admission.remove_draft(drafter.footprint)
        made = ModelDrafter(draft, self.compiled.plan)
        self._admission.add_draft(made.footprint)
        self._owner.runs_imported |= made.compiled.is_imported
        self._scheduler.watch(made.compiled.traces)
        return made

    def _submit(
        self,
        index: int,
        wish: Wish,
        on_chunk: Callable[[Chunk], None] | None = None,
        listener: Callable[[], None] | None = None,
    ) -> Handle:
        # The handle keeps the engine: nobody else may hold it while a request runs.
        handle = Handle(self.cancel, lambda: self._owner.is_current, on_chunk)
        if listener is not None:
            handle.follow(listener)
        request = Request(
            index=index,
            prompt=wish.prompt,
            limit=wish.limit,
            settings=wish.settings,
            top=wish.top,
            text=wish.text,
            ends=self._ends,
            drafter=self._choose_drafter(wish.speculate),
            handle=handle,
            adapter=wish.adapter,
        )
        if request.drafter is not None:
            request.drafter.texts.add(request)
        self._owner.add(request)
        return handle

    def _stream(self, wishes: list[Wish]) -> Iterator[Chunk]:
        news: queue.SimpleQueue[int] = queue.SimpleQueue()  # whose: most may wait for their turn
        handles: list[Handle] = []
        try:
            for index, wish in enumerate(wishes):
                handles.append(self._submit(index, wish, listener=partial(news.put, index)))
            seen = dict.fromkeys(range(len(handles)), 0)
            while seen:
                index = news.get()
                if index not in seen:  # an earlier look found all that it got
                    continue
                for chunk in handles[index].since(seen[index]):
                    seen[index] += 1
                    if chunk.finish_reason:
                        del seen[index]
                    yield chunk
        finally:
            _cancel(handles)


def _cancel(handles: Sequence[Handle]) -> None:
    for handle in handles:
        if not handle.done():
            handle.cancel()


def _is_size(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
