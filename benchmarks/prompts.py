"""Prompts that share no beginnings: an engine that reuses prefixes must not get any for free."""

from __future__ import annotations

import random
from collections.abc import Sequence

TEXT = """
The harbour master keeps two ledgers, one for ships that arrived and another for those that were
only expected. Every evening she compares both, drinks cold tea, and writes a short letter to her
brother, who repairs clocks in a mountain village. His workshop smells of brass and pine; forty
pendulums swing there, and not a single pair agrees about the hour. Children come after school to
argue over which clock is right, while their teacher, an astronomer by training, explains that noon
is a matter of longitude and good manners.

Bread needs flour, water, salt, yeast and patience. Mix the first three, wait half an hour, then add
what remains. A warm kitchen hurries the dough along; a cool cellar gives it flavour instead. Bake
on stone until the crust sings, and resist cutting the loaf before it has cooled.

To measure a river without a boat, throw orange peel upstream, count seconds, and walk beside it.
Speed times width times depth tells you how much passes, though mud near either bank will spoil any
careful estimate. Engineers from Delft repeated this trick in 1931 using bottles, maps, whistles and
one reluctant donkey. Their report fills nine pages, seven of them about the animal.

Music theory begins when somebody asks why certain strings please us together. Pythagoras answered
with ratios; violinists reply by listening. Between these opinions lie keyboards, which compromise
everywhere equally, so that no chord is perfect and none offends. Organ builders once defended their
favourite temperaments as fiercely as cooks defend soup.

Software ages differently from wood. Nothing rots, yet assumptions drift: a format changes, its
author retires, some library drops support quietly. Good programs state what they expect, refuse
anything else, and explain themselves to whoever maintains them next.
"""


def cut(ids: Sequence[int], lengths: Sequence[int], rounds: int) -> list[list[list[int]]]:
    """For each round one prompt of every length: windows of `ids`, taken as a circle.

    No two prompts begin with the same two tokens.

    Raises:
        ValueError: the text has too few different places to begin.
    """
    count = rounds * len(lengths)
    circle = [*ids, *ids]
    seen: set[tuple[int, int]] = set()
    starts: list[int] = []
    stride = max(1, len(ids) // count)
    for start in (s for first in range(stride) for s in range(first, len(ids), stride)):
        pair = (circle[start], circle[start + 1])
        if pair not in seen and len(starts) < count:
            seen.add(pair)
            starts.append(start)
    if len(starts) < count or max(lengths) > len(ids):
        raise ValueError(f"{len(ids)} ids are too few for {rounds} rounds of {len(lengths)}")
    rows = [starts[i : i + len(lengths)] for i in range(0, count, len(lengths))]
    return [
        [circle[start : start + n] for start, n in zip(row, lengths, strict=True)] for row in rows
    ]


def draw(lengths: Sequence[int], rounds: int, vocab_size: int) -> list[list[list[int]]]:
    """For each round one prompt of every length, of random ids: for models of random weights."""
    rng = random.Random(0)
    return [[[rng.randrange(vocab_size) for _ in range(n)] for n in lengths] for _ in range(rounds)]
