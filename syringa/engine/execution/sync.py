"""Steps one after the other, as a CPU does them: compute, draw, tell. `lookahead` is the same for a device."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import torch

from syringa.engine.execution.batch import prepare, wanted_rows
from syringa.engine.execution.overlap import Told
from syringa.engine.sampling.sampler import SampledTokens, Sampler
from syringa.engine.scheduling.oom import Attempt
from syringa.engine.scheduling.scheduler_output import Plan, Scheduled
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.vision.layout import place
from syringa.types import TokenLogprobs

if TYPE_CHECKING:
    from typing import Any

    from syringa.engine.loading.loader import LoadedModel
    from syringa.engine.scheduling.scheduler import Scheduler
    from syringa.engine.structured_output.compiler import GrammarState


class Stepwise:
    def __init__(
        self,
        loaded: LoadedModel,
        cache: Any,
        sampler: Sampler,
        scheduler: Scheduler,
        advance: Callable[[Sequence, int, TokenLogprobs | None], Told],
        score: Callable[[Scheduled, torch.Tensor], None],
        masks: Callable[[list[GrammarState | None]], torch.Tensor | None],
    ) -> None:
        self.short = False  # whether the last plan found too little memory: nothing was drawn
        self._loaded, self._cache, self._sampler, self._scheduler = loaded, cache, sampler, scheduler
        self._advance, self._score, self._masks = advance, score, masks
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def step(self, plan: Plan) -> list[Told]:
        """Computes a plan, and tells what came of it."""
        if not plan.items:
            self.short = False
            return []
        draws = [(item, sequence) for item in plan.items for sequence in item.draws]
        drawn = SampledTokens([], [])
        with Attempt() as attempt:
            drawn = self._compute(plan, draws)
        self.short = attempt.short
        results = zip(draws, drawn.tokens, drawn.logprobs, strict=not self.short)
        return [self._advance(sequence, token, score) for (_, sequence), token, score in results]

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compute(self, plan: Plan, draws: list[tuple[Scheduled, Sequence]]) -> SampledTokens:
        wanted, last_rows, scored = wanted_rows(plan)
        grammars = [sequence.grammar for _, sequence in draws]
        masks = self._pool.submit(self._masks, grammars) if any(grammars) else None
        try:
            step = prepare(plan.items, wanted)
            if self._loaded.vision is not None:
                step.pictures = place(plan.items, step)
            logits = self._loaded.model.forward(step, self._cache)
            for item, begin, end in scored:
                self._score(item, logits[begin:end])
        except BaseException:
            wait([masks] if masks else [])  # the next step reads those grammars too
            raise
        for item in plan.items:
            self._scheduler.complete(item)
        if not draws:
            return SampledTokens([], [])
        rows = [sequence.sampling_row() for _, sequence in draws]
        places = [last_rows[id(item)] for item, _ in draws]
        if places != list(range(len(logits))):  # mostly each draws from its own row, in order: no copy
            logits = logits[torch.tensor(places)]
        return self._sampler.sample(logits, rows, masks.result() if masks else None)
