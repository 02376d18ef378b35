"""What one step computes, as the scheduler says it."""

from __future__ import annotations

from dataclasses import dataclass, field

from syringa.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class Scheduled:
    """`count` tokens of a sequence, from position `start`. `draws`: who draws a token from the last one's logits."""

    sequence: Sequence
    start: int
    count: int
    draws: list[Sequence] = field(default_factory=list)


@dataclass
class Plan:
    items: list[Scheduled] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy first: (source, target)
    forks: list[Sequence] = field(default_factory=list)  # sequences that came to be in this step
    begun: list[Sequence] = field(default_factory=list)  # those of which no token had been computed before
