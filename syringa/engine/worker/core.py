"""The engine without its process: requests in, deltas out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from syringa.engine.cpu.layers.native_ops import NativeSampler
from syringa.engine.execution.executor import ClientDelta, Executor, StepCallbacks
from syringa.engine.execution.interruption import IsInterrupted
from syringa.engine.execution.overlap import ModelRunner, OverlapExecutor
from syringa.engine.execution.sync import SyncExecutor
from syringa.engine.loading.loaded_model import LoadedModel, cache_blocks, state_slots
from syringa.engine.sampling.logprobs import score_prompt
from syringa.engine.sampling.sampler import Sampler
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE, BlockPool
from syringa.engine.scheduling.limits import QueueFull, SchedulerLimits
from syringa.engine.scheduling.oom import OUT_OF_MEMORY, PAUSE_SECONDS, OOMGuard
from syringa.engine.scheduling.pending import PREPARING, PendingRequest, PendingRequests
from syringa.engine.scheduling.requests import make_sequences, validate_request
from syringa.engine.scheduling.scheduler import Scheduler
from syringa.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence, append_token
from syringa.engine.scheduling.state_cache import StateCache, running_slots
from syringa.engine.worker.engine import GeneratingEngine, RecordRunning
from syringa.engine.worker.stats import EngineCounters
from syringa.errors import EngineOverdue, EngineOverloaded, RequestError, SyringaError
from syringa.types import EngineDelta, EngineRequest, EngineStats, ErrorKind, TokenLogprobs

if TYPE_CHECKING:
    from syringa.engine.structured_output.compiler import GrammarState
    from syringa.engine.vision.prompt_images import PromptImages


logger = logging.getLogger("syringa.worker")


class EngineCore(GeneratingEngine):
    def __init__(
        self,
        loaded: LoadedModel,
        limits: SchedulerLimits | None = None,
        *,
        kv_cache_tokens: int = 0,
        kv_cache_gb: float = 0.0,
        prefix_caching: bool = True,
        tokenizer_json: Callable[[], str] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """`progress(done, total)` is called while a GPU is being prepared."""
        self.loaded = loaded
        limits = limits or SchedulerLimits()
        # The states of a hybrid model are allocated first: the KV cache takes what they leave.
        slots = state_slots(loaded, limits)
        states = loaded.cache.states.allocate(slots) if loaded.cache.states is not None else None
        if states is not None:
            limits = replace(limits, max_running=min(limits.max_running, running_slots(slots)))
        blocks = cache_blocks(loaded, kv_cache_tokens, kv_cache_gb, limits)
        # A sequence must be able to run alone, or it could never finish.
        self.max_length = min(loaded.info.max_model_len, blocks * BLOCK_SIZE)
        self.cache: Any = loaded.cache.allocate(blocks, states)
        self.pool = BlockPool(blocks, caching=prefix_caching)
        state_cache = StateCache(slots, caching=prefix_caching) if slots else None
        self.scheduler = Scheduler(self.pool, limits, state_cache)
        self.sampler = Sampler(loaded.info.vocab_size, loaded.device)
        if loaded.kernels is not None:
            self.sampler.plain = NativeSampler(loaded.kernels)
        self.pending = PendingRequests(loaded, self.max_length, self.scheduler.limits.max_queue, tokenizer_json)
        self.counters = EngineCounters()
        self._refused: list[tuple[int, str, SyringaError]] = []
        self._sequences: dict[tuple[int, str], list[Sequence]] = defaultdict(list)  # by client and request id
        self._stepless: list[ClientDelta] = []  # of requests that fail or are only counted
        self._held: list[ClientDelta] = []  # while requests are computed alone
        self.record_running: RecordRunning = lambda fingerprints: None
        self._last_batch: list[bytes] = []
        self._callbacks = StepCallbacks(self._process_token, self._score_prompt, self._fill_masks)
        self.runner: ModelRunner | None = None
        self.executor: Executor = SyncExecutor(loaded, self.cache, self.sampler, self.scheduler, self._callbacks)
        if loaded.gpu is not None:
            self.use_runner(
                loaded.gpu.make_runner(self.cache, self.sampler, self.max_length, limits.max_running, progress)
            )

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        queued = self.scheduler.has_requests
        return bool(queued or self._stepless or self._held or self.pending.any_done or self.executor.busy)

    @property
    def next_step_delay(self) -> float | None:
        """Seconds that may pass before the next step if nothing arrives; None: any number."""
        if self.busy:
            return 0.0
        limit = self.scheduler.limits.queue_seconds
        return min(limit, 1.0) if limit and len(self.pending) else None

    def use_runner(self, runner: ModelRunner) -> None:
        """Run steps on a device from now on, overlapped with the host's work on the step before."""
        self.executor.close()
        self.runner = runner
        self.executor = OverlapExecutor(runner, self.scheduler, self.max_length, self._callbacks)

    @property
    def preparing(self) -> Iterable[bytes]:
        """The fingerprints of the requests whose grammar or images are being prepared."""
        return self.pending.fingerprints

    def attach(self, wake: Callable[[], None], record_running: RecordRunning) -> None:
        """Let `wake` be called when a request is prepared, and `record_running` before each step."""
        self.pending.on_ready, self.record_running = wake, record_running

    def interrupt_when(self, is_interrupted: IsInterrupted) -> None:
        """Let steps of background requests be given up when `is_interrupted`, where the model can do that."""
        if isinstance(self.executor, SyncExecutor) and getattr(self.loaded.model, "interruptible", False):
            self.executor.is_interrupted = is_interrupted
            self.scheduler.background_steps.set_interruptible(True)

    def submit(self, request: EngineRequest, client_id: int = 0) -> None:
        """Queue a request, whose deltas will carry `client_id`. Raises `EngineOverloaded` or `InvalidRequest`.

        In a full queue, a tenant below its share displaces the newest request of the tenant with the most, which
        `take_refused` then returns. A resumed request is accepted in any case.
        """
        now = self.counters.last_active = time.perf_counter()
        validate_request(request, vocab_size=self.loaded.info.vocab_size, max_length=self.max_length)
        try:
            if not self.pending.needs_preparation(request):
                self._enqueue(request, client_id, now - request.waited)
            elif (displaced := self.pending.add(request, client_id, now - request.waited)) is not None:
                self._refuse(displaced, EngineOverloaded(PREPARING))
        except EngineOverloaded:
            self.counters.counts["refused"] += 1
            raise

    def abort(self, request_id: str, choice: int | None = None, client_id: int = 0) -> None:
        """Drop the sequences of a request, or of one choice. They get no further delta."""
        if choice is None:
            self.pending.cancel(client_id, request_id)
        for sequence in list(self._sequences.get((client_id, request_id), ())):
            # A sequence whose siblings have not forked yet still computes the prompt for them.
            if choice is None or (sequence.choice == choice and not sequence.siblings):
                self._drop(sequence)

    def abort_all(self, client_id: int) -> None:
        """Drop all requests of a client that has disconnected."""
        self.pending.cancel(client_id)
        for key in [key for key in self._sequences if key[0] == client_id]:
            self.abort(key[1], client_id=client_id)

    def step(self) -> list[ClientDelta]:
        """Schedule, execute, sample, and return the deltas to emit."""
        started = time.perf_counter()
        self._enqueue_prepared()
        self._refuse_overdue(started)
        output = self.scheduler.schedule(in_flight=self.executor.busy)
        deltas, self._stepless = self._stepless, []
        if output.scheduled or output.state_copies or self.executor.busy:
            self._record_running(output)
            self.counters.record_first_steps(output, started)
            for fork in output.forks:
                self._sequences[fork.client_id, fork.request.id].append(fork)
            deltas += self._execute(output)
            self.counters.record_step(started, 0 if self.executor.interrupted else output.tokens)
            if self.scheduler.background.running_counts and not self.executor.interrupted:
                self.scheduler.background_steps.record(output, time.perf_counter() - started)
        if self.scheduler.isolation.active or self._held:
            deltas = self._hold(deltas)
        return deltas

    def take_refused(self) -> list[tuple[int, str, SyringaError]]:
        """Return, once, the requests that `submit` accepted and that will not run: (client id, request id, error)."""
        refused, self._refused = self._refused, []
        return refused

    def stats(self) -> EngineStats:
        return self.counters.stats(self.scheduler, self.pending, busy=self.busy, max_length=self.max_length)

    def close(self) -> None:
        self.executor.close()
        self.pending.close()

    # One step

    def _record_running(self, output: SchedulerOutput) -> None:
        batch = [item.sequence.request.fingerprint for item in output.scheduled]
        before = self._last_batch if self.executor.busy and self._last_batch != batch else ()
        self.record_running((*batch, *before, *self.pending.fingerprints))
        self._last_batch = batch

    def _hold(self, deltas: list[ClientDelta]) -> list[ClientDelta]:
        """Hold deltas while requests are computed alone, and return all of them afterwards.

        If one of these crashes the worker, the others have sent nothing and can be computed again.
        """
        self._held += deltas
        if self.scheduler.isolation.active:
            return []
        held, self._held = self._held, []
        return held

    def _execute(self, output: SchedulerOutput) -> list[ClientDelta]:
        """Run an output. One that runs out of memory is rolled back, and its sequences are scheduled again."""
        with OOMGuard() as copying:
            self.cache.copy_blocks(output.copies)
            self._copy_states(output.state_copies)
        deltas = self.executor.step(SchedulerOutput() if copying.out_of_memory else output)
        if copying.out_of_memory or self.executor.out_of_memory:
            self._back_off(output, copied=not copying.out_of_memory)
        elif self.executor.interrupted:
            self.scheduler.interrupt(output)
        elif output.scheduled:
            with OOMGuard() as forking:
                self._copy_states(output.forked_states)
            if forking.out_of_memory:
                self.scheduler.drop_forked_states(output)
            self.scheduler.oom_backoff.record_success()
        return deltas

    def _copy_states(self, copies: list[tuple[int, int]]) -> None:
        if copies:
            self.cache.states.copy(copies)

    def _back_off(self, output: SchedulerOutput, *, copied: bool) -> None:
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.scheduler.oom_backoff.group is None:
            logger.warning("engine: step ran out of memory, retrying in smaller steps: tokens=%d", output.tokens)
        time.sleep(PAUSE_SECONDS)
        for sequence in self.scheduler.roll_back(output, copied=copied):
            logger.error("engine: request failed, out of memory: tokens=%d", len(sequence.tokens))
            self._fail_request(sequence)

    def _fail_request(self, sequence: Sequence) -> None:
        """Fail all choices of the request that a sequence belongs to."""
        for each in list(self._sequences.get((sequence.client_id, sequence.request.id), ())):
            choices = range(each.choice, each.choice + 1 + each.siblings)
            self._fail(each.client_id, each.request.id, choices, OUT_OF_MEMORY, "out_of_memory")
            self._drop(each)

    def _fail(
        self, client_id: int, request_id: str, choices: Iterable[int], message: str, error_kind: ErrorKind = "overload"
    ) -> None:
        for choice in choices:
            delta = EngineDelta(request_id, choice, finish="error", error=message, error_kind=error_kind)
            self._stepless.append((client_id, delta))

    def _fill_masks(self, grammars: list[GrammarState | None]) -> torch.Tensor | None:
        compiler = self.pending.compiler
        return compiler.fill_masks(grammars) if compiler and any(grammars) else None

    def _score_prompt(self, item: ScheduledSequence, logits: torch.Tensor) -> None:
        score_prompt(item, logits, vocab_size=self.loaded.info.vocab_size)

    def _process_token(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> ClientDelta:
        """Append a sampled token to its sequence, end the sequence if that is due, and return the delta."""
        stopping = sequence.request.stopping
        tokens, finish, error = append_token(sequence, token, self.max_length)
        self.counters.counts["output_tokens"] += len(tokens)
        stopped = finish == "stop" and tokens and token in (stopping.end_tokens | stopping.stop_tokens)
        first_here = sequence.last_step is None
        begins = first_here and not sequence.request.resumed
        first = sequence.choice == 0 and begins
        delta = EngineDelta(
            sequence.request.id,
            sequence.choice,
            tokens,
            [logprobs] if logprobs is not None and tokens else [],
            finish,
            token if stopped else None,
            sequence.cached if begins else 0,
            sequence.prompt_scores if first_here else None,
            error,
            _error_kind(sequence) if error is not None else "engine",
            sequence.prompt_length if first and sequence.prompt_images else 0,
            round(1000 * sequence.queue_seconds) if first else 0,
        )
        self.counters.record_delta(sequence)
        if finish:
            self._drop(sequence)
        return sequence.client_id, delta

    # Requests in and out

    def _enqueue(
        self,
        request: EngineRequest,
        client_id: int,
        submitted: float,
        grammars: Seq[GrammarState] = (),
        prompt_images: PromptImages | None = None,
        text_prompt: list[int] | None = None,
    ) -> None:
        for sequence in make_sequences(request, client_id, submitted, grammars, prompt_images, text_prompt):
            try:
                self.scheduler.add(sequence)
            except QueueFull:
                full = EngineOverloaded("The queue is full: try again shortly.")
                if (displaced := self.scheduler.displaced_by(sequence)) is None:
                    raise full from None
                self._refuse(displaced, full)
                self.scheduler.add(sequence)
            self._sequences[client_id, request.id].append(sequence)

    def _enqueue_prepared(self) -> None:
        """Queue the pending requests that are done. A failed grammar or image fails its own request only."""
        for pending in self.pending.pop_done():
            request, client_id = pending.request, pending.client_id
            try:
                expanded, grammars, prompt_images = pending.result()
                if request.count_only:
                    counted = EngineDelta(request.id, 0, finish="length", prompt_tokens=len(expanded.prompt))
                    self._stepless.append((client_id, counted))
                    continue
                self._enqueue(expanded, client_id, pending.submitted, grammars, prompt_images, request.prompt)
            except Exception as error:
                if pending.images_failed and isinstance(error, RequestError):
                    self._refused.append((client_id, request.id, error))
                    continue
                message = error.message if isinstance(error, SyringaError) else f"The grammar failed: {error}"
                error_kind: ErrorKind = "engine" if pending.images_failed else "grammar"
                if isinstance(error, EngineOverloaded):
                    error_kind = "overload"
                    self.counters.counts["refused"] += 1
                self._fail(client_id, request.id, request.open_choices, message, error_kind)

    def _refuse_overdue(self, now: float) -> None:
        """Refuse the requests that have waited longer than `queue_seconds` without having begun."""
        if not self.scheduler.limits.queue_seconds:
            return
        before = now - self.scheduler.limits.queue_seconds
        overdue: list[Sequence | PendingRequest] = [
            *self.scheduler.waiting.overdue(before),
            *self.scheduler.isolation.overdue(before),
            *self.pending.overdue(before),
        ]
        for late in overdue:
            self._refuse(late, EngineOverdue(now - late.submitted))

    def _refuse(self, waiting: Sequence | PendingRequest, error: EngineOverloaded) -> None:
        if isinstance(waiting, Sequence):
            self._drop(waiting)
        else:
            self.pending.cancel(waiting.client_id, waiting.request.id)
        self._refused.append((waiting.client_id, waiting.request.id, error))
        self.counters.counts["refused"] += 1

    def _drop(self, sequence: Sequence) -> None:
        """Remove a sequence from the engine and free its blocks."""
        sequence.finished = True
        self.scheduler.finish(sequence)
        self.executor.forget(sequence)
        key = (sequence.client_id, sequence.request.id)
        siblings = self._sequences[key]
        siblings.remove(sequence)
        if not siblings:
            del self._sequences[key]


def _error_kind(sequence: Sequence) -> ErrorKind:
    """Return the kind of an error in a sequence's tokens: constraints of the request may leave none."""
    if sequence.grammar is not None:
        return "grammar"
    return "no_token" if sequence.request.sampling.allowed_tokens else "engine"
