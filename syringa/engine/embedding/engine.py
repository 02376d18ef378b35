"""The engine of a worker for an embedding model or a cross-encoder: requests in, vectors out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

import torch

from syringa.engine.embedding.batch import pack_inputs
from syringa.engine.embedding.loading import LoadedEmbedding
from syringa.engine.embedding.scheduler import EmbeddingJob, EmbeddingScheduler, ScheduledInput
from syringa.engine.scheduling.limits import QueueFull, SchedulerLimits
from syringa.engine.scheduling.oom import PAUSE_SECONDS, OOMGuard
from syringa.engine.worker.engine import RecordRunning
from syringa.engine.worker.stats import EngineCounters
from syringa.errors import (
    OUT_OF_MEMORY_CODE,
    ContextLengthExceeded,
    EngineOverdue,
    EngineOverloaded,
    InvalidRequest,
    SyringaError,
)
from syringa.types import EmbeddingRequest, EmbeddingResult, EngineDelta, EngineRequest, EngineStats, ModelInfo

logger = logging.getLogger("syringa.worker")

FULL = "The queue is full: try again shortly."
OUT_OF_MEMORY = (
    "There is too little memory to compute one of the inputs, even alone: try again later, or with shorter inputs."
)


class EmbeddingEngine:
    """A `WorkerEngine`."""

    def __init__(
        self,
        loaded: LoadedEmbedding,
        limits: SchedulerLimits | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.loaded, self.limits, self._clock = loaded, limits or SchedulerLimits(), clock
        self.scheduler = EmbeddingScheduler(self.limits)
        self.counters = EngineCounters()
        self._jobs: dict[tuple[int, str], EmbeddingJob] = {}  # by client and request id
        self._embedded: list[tuple[int, EmbeddingResult]] = []
        self._refused: list[tuple[int, str, SyringaError]] = []
        self._record_running: RecordRunning = lambda fingerprints: None

    @property
    def next_step_delay(self) -> float | None:
        return 0.0 if self._jobs else None

    @property
    def preparing(self) -> Iterable[bytes]:
        return ()

    def attach(self, wake: Callable[[], None], record_running: RecordRunning) -> None:
        """Let `record_running` be called before each step. Nothing is done between steps that would wake the server."""
        self._record_running = record_running

    def submit(self, request: EngineRequest, client_id: int = 0) -> None:
        what = "scores of pairs of texts" if self.loaded.info.kind == "score" else "embeddings"
        raise InvalidRequest(f"This model computes {what}: it generates no text.")

    def embed(self, request: EmbeddingRequest, client_id: int = 0) -> None:
        """Queue a request, whose result will carry `client_id`. Raises `EngineOverloaded` or `InvalidRequest`."""
        self.counters.last_active = time.perf_counter()
        validate_embedding_request(request, self.loaded.info)
        job = EmbeddingJob(request, client_id, self._clock() - request.waited)
        try:
            displaced = self.scheduler.add(job)
        except QueueFull:
            self.counters.counts["refused"] += 1
            raise EngineOverloaded(FULL) from None
        if displaced is not None:
            self._refuse(displaced, EngineOverloaded(FULL))
        self._jobs[client_id, request.id] = job

    def abort(self, request_id: str, choice: int | None = None, client_id: int = 0) -> None:
        """Drop a request, which gets no result. Unknown ids are ignored: it may just have finished."""
        if (job := self._jobs.get((client_id, request_id))) is not None:
            self._drop(job)

    def abort_all(self, client_id: int) -> None:
        for job in [job for job in self._jobs.values() if job.client_id == client_id]:
            self._drop(job)

    def step(self) -> list[tuple[int, EngineDelta]]:
        """Compute one step. What it completes is returned by `take_embedded`."""
        started = time.perf_counter()
        self._refuse_overdue()
        scheduled = self.scheduler.schedule()
        if scheduled:
            self._record_first_steps(scheduled)
            self._record_running({item.job.request.fingerprint: None for item in scheduled})
            self._execute(scheduled)
            self.counters.record_step(started, sum(len(item.tokens) for item in scheduled))
        return []

    def take_embedded(self) -> list[tuple[int, EmbeddingResult]]:
        embedded, self._embedded = self._embedded, []
        return embedded

    def take_refused(self) -> list[tuple[int, str, SyringaError]]:
        refused, self._refused = self._refused, []
        return refused

    def stats(self) -> EngineStats:
        counters, waiting = self.counters, self.scheduler.waiting
        return EngineStats(
            running=len(self._jobs) - waiting,
            waiting=waiting,
            queue_tenants=len(self.scheduler.tenants),
            idle_seconds=0.0 if self._jobs else time.perf_counter() - counters.last_active,
            prefix_caching=False,
            max_length=self.loaded.info.max_model_len,
            steps=counters.steps,
            step_seconds=counters.step_seconds,
            step_tokens=counters.step_tokens.counts,
            token_gaps=counters.token_gaps.counts,
            queue_seconds=counters.queue_seconds,
            **counters.counts,
        )

    # One step

    def _execute(self, scheduled: list[ScheduledInput]) -> None:
        pairs = any(item.job.request.second for item in scheduled)
        with OOMGuard() as guard:
            batch = pack_inputs(
                [item.tokens for item in scheduled], [item.second for item in scheduled] if pairs else ()
            )
            rows = self.loaded.model.forward(batch).cpu().numpy()
        if guard.out_of_memory:
            self._back_off(scheduled)
            return
        self.scheduler.record_success()
        for item, row in zip(scheduled, rows, strict=True):
            item.job.store(item.number, row)
        for job in {item.job: None for item in scheduled}:
            if job.done and not job.dropped:
                self._finish(job)

    def _finish(self, job: EmbeddingJob) -> None:
        request, values = job.request, job.values
        assert values is not None
        del self._jobs[job.client_id, request.id]
        self.counters.counts["prompt_tokens"] += sum(map(len, request.inputs))
        queued = round(1000 * job.queue_seconds)
        result = EmbeddingResult(request.id, values.shape[1], values.tobytes(), queued)
        self._embedded.append((job.client_id, result))

    def _back_off(self, scheduled: list[ScheduledInput]) -> None:
        """Retry a step that ran out of memory in smaller ones. An input that fails alone fails its request."""
        if self.loaded.device.type == "cuda":
            torch.cuda.empty_cache()
        tokens = sum(len(item.tokens) for item in scheduled)
        time.sleep(PAUSE_SECONDS)
        if len(scheduled) > 1:
            logger.warning("engine: step ran out of memory, retrying in smaller steps: tokens=%d", tokens)
            self.scheduler.roll_back(scheduled)
            return
        logger.error("engine: request failed, out of memory: tokens=%d", tokens)
        self._refuse(scheduled[0].job, EngineOverloaded(OUT_OF_MEMORY, code=OUT_OF_MEMORY_CODE))

    def _record_first_steps(self, scheduled: list[ScheduledInput]) -> None:
        now = self._clock()
        for job in {item.job: None for item in scheduled}:
            if not job.started:
                job.started, job.queue_seconds = True, now - job.submitted
                self.counters.queue_seconds += job.queue_seconds
                self.counters.counts["started"] += 1

    def _refuse_overdue(self) -> None:
        """Refuse the requests that have waited longer than `queue_seconds` without having begun."""
        if not self.limits.queue_seconds:
            return
        now = self._clock()
        for late in self.scheduler.overdue(now - self.limits.queue_seconds):
            self._refuse(late, EngineOverdue(now - late.submitted))

    def _refuse(self, job: EmbeddingJob, error: EngineOverloaded) -> None:
        self._drop(job)
        self._refused.append((job.client_id, job.request.id, error))
        self.counters.counts["refused"] += 1

    def _drop(self, job: EmbeddingJob) -> None:
        job.dropped = True
        self.scheduler.remove(job)
        self._jobs.pop((job.client_id, job.request.id), None)


def validate_embedding_request(request: EmbeddingRequest, info: ModelInfo) -> None:
    """Raise `InvalidRequest` for a request that cannot be run."""
    if not request.inputs:
        raise InvalidRequest("There is nothing to compute: the request has no input.", param="input")
    for tokens in request.inputs:
        if not tokens:
            raise InvalidRequest("An input has no tokens.", param="input")
        if len(tokens) > info.max_model_len:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {info.max_model_len} tokens, and an input has {len(tokens)}.",
                param="input",
            )
        if info.vocab_size and (min(tokens) < 0 or max(tokens) >= info.vocab_size):
            raise InvalidRequest("An input has a token id outside the vocabulary.", param="input")
    if request.second and (
        len(request.second) != len(request.inputs)
        or any(not 0 <= second <= len(tokens) for second, tokens in zip(request.second, request.inputs, strict=True))
    ):
        raise InvalidRequest("The second texts of the pairs do not begin inside of their inputs.", param="input")
