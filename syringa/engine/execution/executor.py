"""The interface between the engine core and the executors that run its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from syringa.types import EngineDelta, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from syringa.engine.structured_output.compiler import GrammarState

ClientDelta = tuple[int, EngineDelta]
"""A delta and the id of the client that it is for."""


@dataclass(frozen=True)
class StepCallbacks:
    """What the engine core does with the results of a step."""

    process_token: Callable[[Sequence, int, TokenLogprobs | None], ClientDelta]  # a sampled token of a sequence
    score_prompt: Callable[[ScheduledSequence, torch.Tensor], None]  # logits of a prompt's positions
    fill_masks: Callable[[list[GrammarState | None]], torch.Tensor | None]  # token masks; None without grammars


class Executor(Protocol):
    """Run scheduler outputs, one step at a time."""

    out_of_memory: bool
    """Whether the last output ran out of memory. Then it sampled no token, and the scheduler has to roll it back."""

    interrupted: bool
    """Whether the last output was given up for a request that has arrived. Then it sampled no token, like above."""

    @property
    def busy(self) -> bool:
        """Whether a step is in flight, whose tokens the next call to `step` returns."""
        ...

    def step(self, output: SchedulerOutput) -> list[ClientDelta]:
        """Run an output, which may be empty, and return the deltas of the tokens that are known by now."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Release what is kept for a sequence that was dropped."""
        ...

    def close(self) -> None: ...
