"""Overlapped execution (asynchronous scheduling): start a step before the tokens of the last one are known.

While a step runs on the device, the host reads, checks and sends the tokens of the step before it. Until then a
sequence's newest token is a placeholder; the device reads it by its row in the last step's sampled tokens. A token
that is sampled for a sequence that turns out to be finished is discarded. Its keys and values lie in a block that no
other sequence can use before the device is done with it, because the device works in order.

Sampling rules that need the host's state (penalties, grammars and the like) do not delay the forward pass, which needs
only the token: those rows are sampled after the tokens before them were read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from syringa.engine.execution.batch import select_logit_rows
from syringa.engine.execution.executor import ClientDelta, StepCallbacks
from syringa.engine.scheduling.oom import OOMGuard
from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from syringa.engine.scheduling.sequence import PENDING_TOKEN, Sequence

if TYPE_CHECKING:
    import torch

    from syringa.engine.sampling.sampler import SampledTokens
    from syringa.engine.sampling.sampler_input import SamplingRow
    from syringa.engine.scheduling.scheduler import Scheduler


@dataclass
class StepInput:
    """A scheduler output with the row indices that the device needs."""

    output: SchedulerOutput
    sampled: list[Sequence]  # the sequences that sample a token, one row each
    sample_rows: list[int]  # index of each one's logits in `logit_rows`
    logit_rows: list[int]  # rows of the batch whose logits are needed
    token_sources: np.ndarray  # per scheduled sequence: row of its first token in the last step's sample; -1: known
    scored: list[tuple[ScheduledSequence, int, int]] = field(default_factory=list)

    @property
    def scheduled(self) -> list[ScheduledSequence]:
        return self.output.scheduled

    @cached_property
    def decode_only(self) -> bool:
        """Whether each row is a sequence that samples its own next token, and none is inside an image."""
        return not self.scored and all(
            item.count == 1
            and len(item.sampled) == 1
            and (item.sequence.prompt_images is None or item.start >= item.sequence.prompt_length)
            for item in self.scheduled
        )

    def tokens(self) -> list[int]:
        """Return the token ids of all rows; those that the host does not know yet are `PENDING_TOKEN`."""
        return [
            token for item in self.scheduled for token in item.sequence.tokens[item.start : item.start + item.count]
        ]


class ModelRunner(Protocol):
    """A device that executes what it is given in order, without the host waiting for it."""

    def start(self, step: StepInput) -> Any:
        """Start the forward pass, and sample all rows as if none needed the host. Return a handle to the step."""
        ...

    def resample(self, handle: Any, at: list[int], rows: list[SamplingRow], masks: torch.Tensor | None) -> None:
        """Sample the rows `at` again, by all the rules."""
        ...

    def copy_tokens_to_host(self, handle: Any) -> None:
        """Start copying the sampled tokens to the host. Called once, when all rows are sampled."""
        ...

    def read_tokens(self, handle: Any) -> SampledTokens:
        """Wait for the tokens of this step, and for nothing that was started after it."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Release what is kept for a sequence that was dropped."""
        ...


@dataclass
class InFlightStep:
    """A step that was started and whose tokens were not read."""

    handle: Any
    sampled: list[Sequence]
    rows: dict[Sequence, int]  # row of each sequence in `sampled`


class OverlapExecutor:
    """Start each step before the tokens of the one before it are processed."""

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, max_length: int, callbacks: StepCallbacks) -> None:
        self.out_of_memory = self.interrupted = False
        self._runner, self._scheduler, self._max_length = runner, scheduler, max_length
        self._callbacks = callbacks
        self._in_flight: InFlightStep | None = None

    @property
    def busy(self) -> bool:
        return self._in_flight is not None

    def step(self, output: SchedulerOutput) -> list[ClientDelta]:
        """Start an output, and process the tokens of the step before it."""
        started = None
        with OOMGuard() as starting:
            started = self._start(output) if output.scheduled else None
        deltas = self._process_in_flight()
        with OOMGuard() as sampling:
            if started is not None:
                self._finish_sampling(started)
        self.out_of_memory = starting.out_of_memory or sampling.out_of_memory
        self._in_flight = None if self.out_of_memory else started
        return deltas

    def forget(self, sequence: Sequence) -> None:
        self._runner.forget(sequence)

    def close(self) -> None:
        pass

    def _start(self, output: SchedulerOutput) -> InFlightStep:
        # Decoding rows come first, the longest context before the others, so that none is left over at the end.
        output.scheduled.sort(key=_decode_first)
        logit_rows, last_rows, scored = select_logit_rows(output)
        sampled = [sequence for item in output.scheduled for sequence in item.sampled]
        sample_rows = [last_rows[id(item)] for item in output.scheduled for _ in item.sampled]
        before = self._in_flight.rows if self._in_flight else {}
        sources = [before[item.sequence] if item.sequence.pending else -1 for item in output.scheduled]
        step = StepInput(output, sampled, sample_rows, logit_rows, np.array(sources, dtype=np.int32), scored)
        handle = self._runner.start(step)
        for item, begin, end in scored:
            self._callbacks.score_prompt(item, handle.logits[begin:end])
        for item in output.scheduled:
            self._scheduler.complete(item)
        return InFlightStep(handle, sampled, {sequence: row for row, sequence in enumerate(sampled)})

    def _process_in_flight(self) -> list[ClientDelta]:
        step, self._in_flight = self._in_flight, None
        if step is None or not step.sampled:
            return []
        result = self._runner.read_tokens(step.handle)
        deltas = []
        for sequence, token, logprobs in zip(step.sampled, result.tokens, result.logprobs, strict=True):
            if sequence.finished:
                continue
            deltas.append(self._callbacks.process_token(sequence, token, logprobs))
            if not sequence.finished:
                self._scheduler.cache_full_blocks(sequence)
        return deltas

    def _finish_sampling(self, step: InFlightStep) -> None:
        """Sample the rows that need the host's state, and append a placeholder to every sampled sequence."""
        at = [row for row, sequence in enumerate(step.sampled) if not sequence.finished and sequence.needs_host]
        if at:
            chosen = [step.sampled[row] for row in at]
            masks = self._callbacks.fill_masks([sequence.grammar for sequence in chosen])
            self._runner.resample(step.handle, at, [sequence.sampling_row() for sequence in chosen], masks)
        if step.sampled:
            self._runner.copy_tokens_to_host(step.handle)
        for sequence in step.sampled:
            if not sequence.finished:
                sequence.tokens.append(PENDING_TOKEN)
                sequence.pending = True
                context_left = self._max_length - len(sequence.tokens)
                max_tokens = sequence.request.stopping.max_tokens
                sequence.ends_with_pending = sequence.generated >= max_tokens or context_left <= 0


def _decode_first(item: ScheduledSequence) -> int:
    return -item.start if item.count == 1 else 1
