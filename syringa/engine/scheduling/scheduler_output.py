"""The scheduler's output: what one step computes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field

from syringa.engine.scheduling.sequence import Sequence


@dataclass(slots=True)
class ScheduledSequence:
    """`count` tokens of a sequence, from position `start`.

    `sampled` are the sequences that sample a token from the last position's logits: none while a prompt is incomplete,
    and the sequence with its new forks when the prompt completes.
    """

    sequence: Sequence
    start: int
    count: int
    sampled: list[Sequence] = field(default_factory=list)
    snapshot: tuple[int, int] | None = None  # of a hybrid model: save the state at this position to this slot, too


@dataclass
class SchedulerOutput:
    scheduled: list[ScheduledSequence] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)  # blocks to copy before the step: (source, target)
    state_copies: list[tuple[int, int]] = field(default_factory=list)  # slots of states to copy before the step
    forked_states: list[tuple[int, int]] = field(default_factory=list)  # those to copy after it, to forks and snapshots
    forks: list[Sequence] = field(default_factory=list)  # sequences created by this step
    begun: list[Sequence] = field(default_factory=list)  # sequences included in a step for the first time

    @property
    def tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(item.count for item in self.scheduled)
