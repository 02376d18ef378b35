"""The engine without its process: requests in, deltas out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from syringa.engine.cpu.layers.native_ops import NativeDraw
from syringa.engine.execution.overlap import Lookahead, Runner, Told
from syringa.engine.execution.sync import Stepwise
from syringa.engine.loading.loader import LoadedModel, cache_blocks
from syringa.engine.sampling.sampler import Sampler, SamplerState
from syringa.engine.sampling.scoring import score_prompt
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool
from syringa.engine.scheduling.limits import Limits, QueueFull
from syringa.engine.scheduling.oom import PAUSE_SECONDS, TOO_LARGE, Attempt
from syringa.engine.scheduling.outcome import take_token
from syringa.engine.scheduling.pending import PREPARING, Arrival, Arrivals
from syringa.engine.scheduling.scheduler import Scheduler
from syringa.engine.scheduling.scheduler_output import Plan
from syringa.engine.scheduling.sequence import Sequence
from syringa.engine.worker.stats import Tally
from syringa.errors import EngineOverloaded, InvalidRequest, RequestError, SyringaError
from syringa.types import EngineDelta, EngineRequest, EngineStats, Fault, TokenLogprobs

if TYPE_CHECKING:
    from syringa.engine.structured_output.compiler import GrammarState
    from syringa.engine.vision.images import Pictures


logger = logging.getLogger("syringa.worker")


class EngineCore:
    def __init__(
        self,
        loaded: LoadedModel,
        limits: Limits | None = None,
        *,
        kv_cache_tokens: int = 0,
        kv_cache_gb: float = 0.0,
        prefix_caching: bool = True,
        tokenizer_json: Callable[[], str] | None = None,
        progress: Callable[[int, int], None] | None = None,  # of what is prepared on a GPU
    ) -> None:
        self.loaded = loaded
        limits = limits or Limits()
        blocks = cache_blocks(loaded, kv_cache_tokens, kv_cache_gb, limits)
        # A sequence must be able to run alone, or it could never finish.
        self.max_length = min(loaded.info.max_model_len, blocks * BLOCK_SIZE)
        self.cache: Any = loaded.cache.allocate(blocks)
        self.pool = BlockPool(blocks, caching=prefix_caching)
        self.scheduler = Scheduler(self.pool, limits)
        self.sampler = Sampler(loaded.info.vocab_size, loaded.device)
        if loaded.kernels is not None:
            self.sampler.plain = NativeDraw(loaded.kernels)
        self.arrivals = Arrivals(loaded, self.max_length, self.scheduler.limits.max_queue, tokenizer_json)
        self._refused: list[tuple[int, str, SyringaError]] = []
        self._sequences: dict[tuple[int, str], list[Sequence]] = defaultdict(list)
        self._failed: list[tuple[int, EngineDelta]] = []
        self.tally = Tally()
        self._score = partial(score_prompt, vocabulary=loaded.info.vocab_size)
        self.direct = Stepwise(loaded, self.cache, self.sampler, self.scheduler, self._advance, self._score, self._fill)
        self.ahead: Lookahead | None = None
        if loaded.gpu is not None:
            self.look_ahead(loaded.gpu.runner(self.cache, self.sampler, self.max_length, limits.max_running, progress))

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        queued = self.scheduler.running or len(self.scheduler.waiting) or self._failed or self.arrivals.any_done
        return bool(queued or (self.ahead and self.ahead.busy))

    @property
    def patience(self) -> float | None:
        """How many seconds may pass before the next step, if nothing comes meanwhile. None: any number."""
        if self.busy:
            return 0.0
        limit = self.scheduler.limits.queue_seconds
        return min(limit, 1.0) if limit and len(self.arrivals) else None

    def look_ahead(self, runner: Runner) -> None:
        """From now on, a step is computed by `runner` while the host deals with the one before."""
        self.ahead = Lookahead(
            runner, self.scheduler, self.max_length, advance=self._advance, score=self._score, masks=self._fill
        )

    def submit(self, request: EngineRequest, origin: int = 0) -> None:
        """Queues a request. Raises `EngineOverloaded` or `InvalidRequest`; `origin` comes back with its deltas.

        In a full queue a tenant with less than its share gets a place of the tenant with the most, whose newest
        request `take_refused` then has: one tenant's overload must not become everybody's.
        """
        now = self.tally.active = time.perf_counter()
        if not request.prompt:
            raise InvalidRequest("The prompt has no tokens.", param="prompt")
        if len(request.prompt) > self.max_length:
            raise InvalidRequest(f"The prompt has {len(request.prompt)} tokens; {self.max_length} fit.", param="prompt")
        if min(request.prompt) < 0 or max(request.prompt) >= self.loaded.info.vocab_size:
            raise InvalidRequest("The prompt has a token id outside the vocabulary.", param="prompt")
        try:
            if not self.arrivals.delays(request):
                self._enqueue(request, origin, now)
            elif (displaced := self.arrivals.add(request, origin, now)) is not None:
                self._turn_away(displaced, EngineOverloaded(PREPARING))
        except EngineOverloaded:
            self.tally.counts["refused"] += 1
            raise

    def abort(self, request_id: str, choice: int | None = None, origin: int = 0) -> None:
        """Frees a request's sequences, or one choice's. They get no further delta."""
        if choice is None:
            self.arrivals.forget(origin, request_id)
        for sequence in list(self._sequences.get((origin, request_id), ())):
            # One that still carries the prompt for its siblings cannot be spared alone.
            if choice is None or (sequence.choice == choice and not sequence.siblings):
                self._drop(sequence)

    def abort_all(self, origin: int) -> None:
        """Frees everything that a client which is gone had sent."""
        self.arrivals.forget(origin)
        for key in [key for key in self._sequences if key[0] == origin]:
            self.abort(key[1], origin=origin)

    def step(self) -> list[tuple[int, EngineDelta]]:
        """Schedules, computes, draws, and tells what came of it: (origin, delta) pairs."""
        started = time.perf_counter()
        for arrival in self.arrivals.take():
            self._admit(arrival)
        if self.scheduler.limits.queue_seconds:
            self._end_waiting(started)
        plan = self.scheduler.schedule()
        deltas, self._failed = self._failed, []
        if plan.items or (self.ahead and self.ahead.busy):
            self.tally.begin(plan, started)
            for fork in plan.forks:
                self._sequences[fork.origin, fork.request.id].append(fork)
            deltas += self._compute(plan)
            self.tally.end(started)
        return deltas

    def take_refused(self) -> list[tuple[int, str, SyringaError]]:
        """Requests that will not run although `submit` had taken them: (origin, id, why). Told once."""
        refused, self._refused = self._refused, []
        return refused

    def stats(self) -> EngineStats:
        return self.tally.stats(self.scheduler, self.arrivals, busy=self.busy)

    def close(self) -> None:
        self.direct.close()
        self.arrivals.close()

    # One step

    def _compute(self, plan: Plan) -> list[Told]:
        """Runs a plan. One that finds too little memory is undone, and what was in it comes again in smaller ones."""
        with Attempt() as copying:
            self.cache.copy_blocks(plan.copies)
        steps = self.ahead or self.direct
        told = steps.step(Plan() if copying.short else plan)
        if copying.short or steps.short:
            self._make_smaller(plan, copied=not copying.short)
        elif plan.items:
            self.scheduler.relief.went_well()
        return told

    def _make_smaller(self, plan: Plan, *, copied: bool) -> None:
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.scheduler.relief.group is None:
            tokens = sum(item.count for item in plan.items)
            logger.warning("too little memory for a step of %d tokens: smaller ones follow", tokens)
        time.sleep(PAUSE_SECONDS)
        for sequence in self.scheduler.undo(plan, copied=copied):
            logger.error("too little memory for a request of %d tokens: it is given up", len(sequence.tokens))
            self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Its request fails, with all its choices."""
        for each in list(self._sequences.get((sequence.origin, sequence.request.id), ())):
            self._fail(each.origin, each.request.id, range(each.choice, each.choice + 1 + each.siblings), TOO_LARGE)
            self._drop(each)

    def _fail(self, origin: int, name: str, choices: range, message: str, fault: Fault = "overload") -> None:
        for choice in choices:
            self._failed.append((origin, EngineDelta(name, choice, finish="error", error=message, fault=fault)))

    def _fill(self, grammars: list[GrammarState | None]) -> torch.Tensor | None:
        compiler = self.arrivals.compiler
        return compiler.fill_masks(grammars) if compiler and any(grammars) else None

    def _advance(self, sequence: Sequence, token: int, score: TokenLogprobs | None) -> tuple[int, EngineDelta]:
        """Adds a drawn token to its sequence, ends it if that is due, and tells the client."""
        stopping, grammar = sequence.request.stopping, sequence.grammar
        tokens, finish, error = take_token(sequence, token, self.max_length)
        self.tally.counts["output_tokens"] += len(tokens)
        ended = finish == "stop" and tokens and token in (stopping.end_tokens | stopping.stop_tokens)
        first = sequence.choice == 0 and not sequence.started
        delta = EngineDelta(
            sequence.request.id,
            sequence.choice,
            tokens,
            [score] if score is not None and tokens else [],
            finish,
            token if ended else None,
            0 if sequence.started else sequence.cached,
            sequence.prompt_scores if first else None,
            error,
            "grammar" if grammar is not None and error is not None else "engine",
            sequence.prompt_length if first and sequence.pictures else 0,
            round(1000 * sequence.queued) if first else 0,
        )
        self.tally.answer(sequence)
        if finish:
            self._drop(sequence)
        return sequence.origin, delta

    # Coming and going

    def _enqueue(
        self,
        request: EngineRequest,
        origin: int,
        submitted: float,
        grammar: GrammarState | None = None,
        pictures: Pictures | None = None,
        written: list[int] | None = None,  # the prompt before images took their places: penalties are about text
    ) -> None:
        sequence = Sequence(
            request,
            0,
            SamplerState(request.sampling, written or request.prompt),
            grammar,
            origin,
            list(request.prompt),
            siblings=request.choices - 1,
            prompt_scores=[None] if request.prompt_logprobs is not None else None,
            submitted=submitted,
            pictures=pictures,
        )
        try:
            self.scheduler.add(sequence)
        except QueueFull:
            full = EngineOverloaded("The queue is full: try again shortly.")
            if (displaced := self.scheduler.displaced_by(request.tenant)) is None:
                raise full from None
            self._turn_away(displaced, full)
            self.scheduler.add(sequence)
        self._sequences[origin, request.id].append(sequence)

    def _admit(self, arrival: Arrival) -> None:
        """Queues a request that is ready. A grammar's or an image's failure ends its own request only."""
        request, origin = arrival.request, arrival.origin
        try:
            expanded, grammar, pictures = arrival.result()
            self._enqueue(expanded, origin, arrival.submitted, grammar, pictures, request.prompt)
        except Exception as error:
            if arrival.images_failed and isinstance(error, RequestError):
                self._refused.append((origin, request.id, error))
                return
            message = error.message if isinstance(error, SyringaError) else f"The grammar failed: {error}"
            fault: Fault = "engine" if arrival.images_failed else "grammar"
            if isinstance(error, EngineOverloaded):
                fault = "overload"
                self.tally.counts["refused"] += 1
            self._fail(origin, request.id, range(request.choices), message, fault)

    def _end_waiting(self, now: float) -> None:
        """Refuses those that nothing was done for within the time that a request may wait."""
        before = now - self.scheduler.limits.queue_seconds
        overdue: list[Sequence | Arrival] = [*self.scheduler.waiting.overdue(before), *self.arrivals.overdue(before)]
        for late in overdue:
            text = f"The request waited {now - late.submitted:.1f} s in the queue and was not begun: try again later."
            self._turn_away(late, EngineOverloaded(text))

    def _turn_away(self, waiting: Sequence | Arrival, error: EngineOverloaded) -> None:
        if isinstance(waiting, Sequence):
            self._drop(waiting)
        else:
            self.arrivals.forget(waiting.origin, waiting.request.id)
        self._refused.append((waiting.origin, waiting.request.id, error))
        self.tally.counts["refused"] += 1

    def _drop(self, sequence: Sequence) -> None:
        sequence.ended = True
        self.scheduler.finish(sequence)
        if self.ahead:
            self.ahead.runner.forget(sequence)
        key = (sequence.origin, sequence.request.id)
        family = self._sequences[key]
        family.remove(sequence)
        if not family:
            del self._sequences[key]
