"""One prompt on its way through the engine, and what comes out of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from funcrt.cache import CacheState
from funcrt.engine.handle import Handle

if TYPE_CHECKING:
    from funcrt.engine.speculative import Drafter
    from funcrt.text import TextStream

Alternatives = tuple[tuple[int, float], ...]
"""The most likely tokens of one step with their log-probabilities, the most likely first."""


@dataclass
class Completion:
    """What one prompt got.

    Attributes:
        tokens: new ids, the end-of-text token included where one ended it.
        text: their text without special tokens, cut before a stop string.
        logprobs: natural log of each token's probability before bias, penalties, temperature and
            filters.
        top_logprobs: for each token the most likely ones of its step, as many as were asked for.
        finish_reason: "stop" (end of text or stop string), "length" (`max_tokens`, or the largest
            capacity is full), "cancelled", or "error" (the model gave logits that are not finite).
        prompt_tokens: how many ids the prompt had.
        reused_tokens: how many of them were in the cache already, for an earlier prompt.
    """

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Alternatives] = field(default_factory=list)
    finish_reason: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0


@dataclass(frozen=True)
class Chunk:
    """One new token of one prompt: `text` may be empty while a character or stop string is open.

    A request that is cancelled ends with a chunk whose `token` is -1.
    """

    index: int
    token: int
    text: str
    finish_reason: str
    logprob: float = math.nan
    top_logprobs: Alternatives = ()


class Choice(NamedTuple):
    """What the model chose for one row at one step."""

    token: int
    logprob: float
    alternatives: Alternatives = ()

    @property
    def finite(self) -> bool:
        """Whether the row's logits were, see `sampling.Sampled`."""
        return not math.isnan(self.logprob)


@dataclass(eq=False)
class Request:
    """A prompt, how it is to be completed, and how far that is.

    Attributes:
        index: its place in the call that it came with.
        prompt: ids.
        limit: most new tokens.
        settings: one row of sampling settings, plain values.
        top: how many alternatives of every token are wanted.
        text: what turns its tokens into text; None for a model of ids only.
        ends: ids that end a text.
        drafter: guesses its next tokens; None decodes one at a time.
        handle: where its chunks go.
        adapter: which of the model's adapters its row takes; 0 for none.
        sequence: prompt and new tokens.
        cached: how many of `sequence` the cache holds.
        row: its cache while the prompt is prefilled: a state of one row.
        waited: chunks of other prompts that went before its own.
        written: the most that the cache has held of it, wrong guesses included.
        guesses: how many tokens its drafter may guess next.
        misses: how often in a row it guessed wrong; for `pause` steps it is not asked.
    """

    index: int
    prompt: list[int]
    limit: int
    settings: dict[str, Any]
    top: int
    text: TextStream | None
    ends: frozenset[int]
    drafter: Drafter | None
    handle: Handle
    adapter: int = 0
    sequence: list[int] = field(default_factory=list)
    completion: Completion = field(default_factory=Completion)
    cached: int = 0
    row: CacheState | None = None
    written: int = 0
    waited: int = 0
    guesses: int = 3
    misses: int = 0
    pause: int = 0

    def __post_init__(self) -> None:
        self.sequence = list(self.prompt)
        self.completion.prompt_tokens = len(self.prompt)
        self.handle.completion = self.completion

    def leave_drafter(self) -> None:
        """Do without guesses from now on."""
        drafter, self.drafter = self.drafter, None
        if drafter is not None:
            drafter.forget(self)
            drafter.texts.discard(self)

    @property
    def pending(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return max(0, len(self.prompt) - self.cached)

    @property
    def longest(self) -> int:
        """Tokens in the cache at the limit: the last new one is never put in."""
        return len(self.prompt) + self.limit - 1

    @property
    def remaining(self) -> int:
        """New tokens that may still come."""
        return self.limit - len(self.completion.tokens)

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return bool(self.completion.finish_reason)

    def take(self, choice: Choice) -> Chunk:
        """Record one new token; `completion.finish_reason` says whether it was the last."""
        done = self.completion
        if not choice.finite:
            done.finish_reason = "error"
            return Chunk(self.index, choice.token, self._end_text(), "error")
        done.tokens.append(choice.token)
        done.logprobs.append(choice.logprob)
        if self.top:
            done.top_logprobs.append(choice.alternatives[: self.top])
        self.sequence.append(choice.token)
        done.finish_reason = "stop" if choice.token in self.ends else ""
        piece = ""
        if self.text is not None:
            # An end token is not text: neither its characters nor a stop string begun before it.
            piece = "" if done.finish_reason else self.text.push(choice.token)
            done.text += piece
            if self.text.stopped:
                done.finish_reason = "stop"
        if not done.finish_reason and not self.remaining:
            done.finish_reason = "length"
        if done.finish_reason:
            piece += self._end_text()
        return Chunk(
            self.index,
            choice.token,
            piece,
            done.finish_reason,
            choice.logprob,
            choice.alternatives[: self.top],
        )

    def cancel(self) -> Chunk:
        """End where it is."""
        self.completion.finish_reason = "cancelled"
        return Chunk(self.index, -1, self._end_text(), "cancelled")

    def _end_text(self) -> str:
        piece = "" if self.text is None else self.text.finish()
        self.completion.text += piece
        return piece
