"""Synchronous execution, as on a CPU: forward pass, sampling and processing one after the other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from syringa.engine.execution.batch import build_step_tensors, locate_states, select_logit_rows
from syringa.engine.execution.executor import ClientDelta, StepCallbacks
from syringa.engine.execution.interruption import IsInterrupted, StepInterrupted
from syringa.engine.sampling.sampler import SampledTokens, Sampler
from syringa.engine.scheduling.oom import OOMGuard
from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.step_images import locate_images

if TYPE_CHECKING:
    from typing import Any

    from syringa.engine.loading.loaded_model import LoadedModel
    from syringa.engine.scheduling.scheduler import Scheduler


class SyncExecutor:
    """Run each step to its end; token masks are computed in a thread during the forward pass."""

    busy = False

    def __init__(
        self, loaded: LoadedModel, cache: Any, sampler: Sampler, scheduler: Scheduler, callbacks: StepCallbacks
    ) -> None:
        self.out_of_memory = self.interrupted = False
        self.is_interrupted: IsInterrupted | None = None  # None: no step is given up
        self._loaded, self._cache, self._sampler, self._scheduler = loaded, cache, sampler, scheduler
        self._callbacks = callbacks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def step(self, output: SchedulerOutput) -> list[ClientDelta]:
        self.out_of_memory = self.interrupted = False
        if not output.scheduled:
            return []
        sampled = [(item, sequence) for item in output.scheduled for sequence in item.sampled]
        result = SampledTokens([], [])
        with OOMGuard() as guard:
            try:
                result = self._compute(output, sampled)
            except StepInterrupted:
                self.interrupted = True
        self.out_of_memory = guard.out_of_memory
        failed = self.out_of_memory or self.interrupted
        rows = zip(sampled, result.tokens, result.logprobs, strict=not failed)
        return [self._callbacks.process_token(sequence, token, logprobs) for (_, sequence), token, logprobs in rows]

    def forget(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compute(self, output: SchedulerOutput, sampled: list[tuple[ScheduledSequence, Sequence]]) -> SampledTokens:
        logit_rows, last_rows, scored = select_logit_rows(output)
        grammars = [sequence.grammar for _, sequence in sampled]
        masks = self._pool.submit(self._callbacks.fill_masks, grammars) if any(grammars) else None
        try:
            step = build_step_tensors(output.scheduled, logit_rows)
            if self._loaded.vision is not None:
                step.images = locate_images(output.scheduled, step)
            if self._scheduler.states is not None:
                step.states = locate_states(output.scheduled)
            if self.is_interrupted is not None and self._scheduler.may_interrupt(output):
                step.is_interrupted = self.is_interrupted
            logits = self._loaded.model.forward(step, self._cache)
            for item, begin, end in scored:
                self._callbacks.score_prompt(item, logits[begin:end])
        except BaseException:
            wait([masks] if masks else [])  # the next step uses the same grammar states
            raise
        for item in output.scheduled:
            self._scheduler.complete(item)
        if not sampled:
            return SampledTokens([], [])
        rows = [sequence.sampling_row() for _, sequence in sampled]
        sample_rows = [last_rows[id(item)] for item, _ in sampled]
        if sample_rows != list(range(len(logits))):  # usually every row is sampled once, in order: no copy
            logits = logits[torch.tensor(sample_rows)]
        return self._sampler.sample(logits, rows, masks.result() if masks else None)
