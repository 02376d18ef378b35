"""Steps that are started before the last one's tokens are known, so that the device never waits for the host.

A step is started; then, while it runs, the tokens of the one before it are read, checked and sent. Until then a
sequence's newest token is a placeholder: the device has it, and reads it by its row in the last step's draws. What a
sequence draws after it has turned out to be finished is thrown away: its keys and values lie in a block that nobody
else can get before the device is done with them, because the device does one thing after the other.

Rules that need the host's memory of a choice (penalties, grammars and the like) do not hold anybody up: the forward
pass needs the token alone, and those draws are started after the tokens before them were read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from syringa.engine.execution.batch import wanted_rows
from syringa.engine.scheduling.oom import Attempt
from syringa.engine.scheduling.scheduler_output import Plan, Scheduled
from syringa.engine.scheduling.sequence import PENDING, Sequence
from syringa.types import EngineDelta, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from syringa.engine.sampling.sampler import SampledTokens, SamplingRow
    from syringa.engine.scheduling.scheduler import Scheduler
    from syringa.engine.structured_output.compiler import GrammarState

Told = tuple[int, EngineDelta]


@dataclass
class Layout:
    """A plan, and what the device has to know beside it."""

    plan: Plan
    draws: list[Sequence]
    places: list[int]  # where each draw's logits are among the wanted rows
    wanted: list[int]  # rows whose logits are needed
    sources: np.ndarray  # for each item: the last step's draw that its first token is; -1: the host knows it
    scored: list[tuple[Scheduled, int, int]] = field(default_factory=list)

    @property
    def items(self) -> list[Scheduled]:
        return self.plan.items

    @cached_property
    def adds_one_each(self) -> bool:
        """Whether every row is a sequence that draws its own next token, and nothing more. None shows an image."""
        return not self.scored and all(
            item.count == 1
            and len(item.draws) == 1
            and (item.sequence.pictures is None or item.start >= item.sequence.prompt_length)
            for item in self.items
        )

    def tokens(self) -> list[int]:
        """Of all rows. What the host does not know yet is `PENDING`."""
        return [token for item in self.items for token in item.sequence.tokens[item.start : item.start + item.count]]


class Runner(Protocol):
    """The device. What it is given, it does in that order."""

    def start(self, layout: Layout) -> Any:
        """Computes the plan's tokens and draws for every row as if it needed nothing of the host."""
        ...

    def draw(self, running: Any, at: list[int], rows: list[SamplingRow], masks: torch.Tensor | None) -> None:
        """Draws again for the rows `at`, by all the rules."""
        ...

    def send(self, running: Any) -> None:
        """Every draw is made: the tokens may come home."""
        ...

    def read(self, running: Any) -> SampledTokens:
        """Waits for this step's tokens, and for nothing after them."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """A sequence is gone."""
        ...


def _by_length(item: Scheduled) -> int:
    return -item.start if item.count == 1 else 1


@dataclass
class Flight:
    running: Any
    draws: list[Sequence]
    rows: dict[Sequence, int]  # where each draws


class Lookahead:
    """Takes an engine's plans, and tells what came of the one before."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        max_length: int,
        *,
        advance: Callable[[Sequence, int, TokenLogprobs | None], Told],
        score: Callable[[Scheduled, torch.Tensor], None],
        masks: Callable[[list[GrammarState | None]], torch.Tensor | None],
    ) -> None:
        self.runner = runner
        self.short = False  # whether the last plan found too little memory
        self._scheduler, self._max_length = scheduler, max_length
        self._advance, self._score, self._masks = advance, score, masks
        self._flight: Flight | None = None

    @property
    def busy(self) -> bool:
        return self._flight is not None

    def step(self, plan: Plan) -> list[Told]:
        """Starts a plan, which may be empty, and settles the one before it.

        Where there is too little memory for it, the plan is as good as never started: nothing is drawn, and `short`
        says so.
        """
        flight = None
        with Attempt() as starting:
            flight = self._start(plan) if plan.items else None
        told = self._settle()
        with Attempt() as drawing:
            if flight is not None:
                self._finish_draws(flight)
        self.short = starting.short or drawing.short
        self._flight = None if self.short else flight
        return told

    def _start(self, plan: Plan) -> Flight:
        # Those that add one token go first, the longest before the others: none should be left over at the end.
        plan.items.sort(key=_by_length)
        wanted, last_rows, scored = wanted_rows(plan)
        draws = [sequence for item in plan.items for sequence in item.draws]
        places = [last_rows[id(item)] for item in plan.items for _ in item.draws]
        before = self._flight.rows if self._flight else {}
        sources = [before[item.sequence] if item.sequence.pending else -1 for item in plan.items]
        layout = Layout(plan, draws, places, wanted, np.array(sources, dtype=np.int32), scored)
        running = self.runner.start(layout)
        for item, begin, end in scored:
            self._score(item, running.logits[begin:end])
        for item in plan.items:
            self._scheduler.complete(item)
        return Flight(running, draws, {sequence: row for row, sequence in enumerate(draws)})

    def _settle(self) -> list[Told]:
        flight, self._flight = self._flight, None
        if flight is None or not flight.draws:
            return []
        drawn = self.runner.read(flight.running)
        told = []
        for sequence, token, score in zip(flight.draws, drawn.tokens, drawn.logprobs, strict=True):
            if sequence.ended:
                continue
            told.append(self._advance(sequence, token, score))
            if not sequence.ended:
                self._scheduler.publish(sequence)
        return told

    def _finish_draws(self, flight: Flight) -> None:
        """The draws that the device could not make by itself, now that their past is known."""
        at = [row for row, sequence in enumerate(flight.draws) if not sequence.ended and sequence.needs_host]
        if at:
            chosen = [flight.draws[row] for row in at]
            masks = self._masks([sequence.grammar for sequence in chosen])
            self.runner.draw(flight.running, at, [sequence.sampling_row() for sequence in chosen], masks)
        if flight.draws:
            self.runner.send(flight.running)
        for sequence in flight.draws:
            if not sequence.ended:
                sequence.tokens.append(PENDING)
                sequence.pending = True
                room = self._max_length - len(sequence.tokens)
                sequence.spent = sequence.generated >= sequence.request.stopping.max_tokens or room <= 0
