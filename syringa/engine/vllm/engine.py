"""The engine of a worker on vLLM: requests in, deltas out, over `AsyncLLM`, which runs in an event loop of its own.

The server's thread does the bookkeeping. Outputs pass from the event loop to it in batches: what one step of vLLM has
produced wakes the server once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Any, NamedTuple, Protocol

from syringa.engine.scheduling.requests import validate_request
from syringa.engine.vllm.isolation import IsolationGate
from syringa.engine.vllm.outputs import VllmOutput, failure, to_delta
from syringa.engine.vllm.requests import ChoiceRequest, to_choice_requests
from syringa.engine.vllm.stats import VllmCounters
from syringa.engine.worker.engine import GeneratingEngine, RecordRunning
from syringa.errors import EngineOverdue, EngineOverloaded, EngineUnavailable, SyringaError
from syringa.types import EngineDelta, EngineRequest, EngineStats

logger = logging.getLogger("syringa.worker")

RETRY_SECONDS = 0.5  # interval of checks while requests wait for a time to pass
BACKGROUND_PRIORITY = 1 << 40  # above that of any other request: vLLM preempts and admits these last


class Generate(Protocol):
    """Run one choice in vLLM. Raises what `AsyncLLM.generate` raises."""

    def __call__(self, choice: ChoiceRequest, id: str, priority: int) -> AsyncGenerator[VllmOutput]: ...


class VllmLimits(NamedTuple):
    vocab_size: int
    max_length: int  # of a sequence, in tokens
    max_running: int
    max_queue: int
    queue_seconds: float = 0.0  # a request that waits longer without having begun is refused; 0: no limit
    blocks: int = 0  # of the KV cache
    block_size: int = 0
    prefix_caching: bool = True


class _Choice:
    """A choice of a request, and the task that runs it."""

    __slots__ = ("begun", "ended", "run", "task", "wanted")

    def __init__(self, run: _Run, wanted: ChoiceRequest) -> None:
        self.run, self.wanted = run, wanted
        self.begun = self.ended = False
        self.task: asyncio.Task[None] | None = None


class _Run:
    """A request of a client."""

    def __init__(self, request: EngineRequest, client_id: int, wanted: Iterable[ChoiceRequest]) -> None:
        self.request, self.client_id = request, client_id
        self.choices = {each.choice: _Choice(self, each) for each in wanted}
        self.submitted = time.perf_counter()
        self.started = False  # whether vLLM has it

    @property
    def open(self) -> list[_Choice]:
        return [each for each in self.choices.values() if not each.ended]

    @property
    def begun(self) -> bool:
        return all(each.begun or each.ended for each in self.choices.values())

    @property
    def ended(self) -> bool:
        return not self.open


class VllmEngine(GeneratingEngine):
    """A `WorkerEngine`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        generate: Generate,
        limits: VllmLimits,
        *,
        special_tokens: dict[str, int],
        counters: VllmCounters,
        to_error: Callable[[Exception], SyringaError | None] = lambda error: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`loop` runs in another thread. `special_tokens`: their ids by name.

        `to_error` returns what the client is told of an exception, None if it is the engine's fault.
        """
        self._loop, self._generate, self._limits = loop, generate, limits
        self._special_tokens, self._counters, self._to_error, self._clock = special_tokens, counters, to_error, clock
        self._runs: dict[tuple[int, str], _Run] = {}  # by client and request id
        self._gate: IsolationGate[_Run] = IsolationGate(self._start, clock)
        self._arrived: deque[tuple[_Choice, VllmOutput | Exception]] = deque()  # filled by the event loop
        self._wake_scheduled = False  # of the event loop
        self._failed: list[tuple[int, EngineDelta]] = []
        self._held: list[tuple[int, EngineDelta]] = []  # while a request is computed alone
        self._refused: list[tuple[int, str, SyringaError]] = []
        self._progress = (0, False)
        self._wake: Callable[[], None] = lambda: None
        self._record_running: RecordRunning = lambda fingerprints: None

    @property
    def next_step_delay(self) -> float | None:
        if self._arrived or self._failed or self._refused:
            return 0.0
        queued = bool(self._limits.queue_seconds) and any(not each.begun for each in self._runs.values())
        return RETRY_SECONDS if queued or self._gate.active else None

    @property
    def preparing(self) -> Iterable[bytes]:
        """The fingerprints of all requests: vLLM computes without regard to the steps of this process."""
        return [run.request.fingerprint for run in self._runs.values() if run.started]

    @property
    def active(self) -> bool:
        """Whether vLLM has something to compute."""
        return any(run.started for run in self._runs.values())

    def take_progress(self) -> bool:
        """Return whether vLLM has ended a step, or has got something to do, since the last call."""
        before, self._progress = self._progress, (self._counters.steps, self.active)
        return before != self._progress

    def attach(self, wake: Callable[[], None], record_running: RecordRunning) -> None:
        self._wake, self._record_running = wake, record_running

    def submit(self, request: EngineRequest, client_id: int = 0) -> None:
        """Accept a request. Raises `EngineOverloaded` or `InvalidRequest`.

        One that vLLM cannot continue gets a delta with an error instead: the client has done nothing wrong.
        """
        limits = self._limits
        validate_request(request, vocab_size=limits.vocab_size, max_length=limits.max_length)
        try:
            wanted = to_choice_requests(request, self._special_tokens)
        except EngineUnavailable as error:
            self._failed += [
                (client_id, failure(request, choice, error.message, "unavailable")) for choice in request.open_choices
            ]
            return
        accepted = request.resumed or request.background  # API servers bound what they run of batches
        if not accepted and self._waiting() >= limits.max_queue:
            self._counters.counts["refused"] += 1
            raise EngineOverloaded("The queue is full: try again shortly.")
        if not self._runs:
            self._counters.last_active = self._clock()
        run = self._runs[client_id, request.id] = _Run(request, client_id, wanted)
        run.submitted = self._clock() - request.waited
        self._gate.add(run)

    def abort(self, request_id: str, choice: int | None = None, client_id: int = 0) -> None:
        run = self._runs.get((client_id, request_id))
        if run is None:
            return
        for each in run.open:
            if choice is None or each.wanted.choice == choice:
                self._cancel(each)
        self._forget_ended(run)

    def abort_all(self, client_id: int) -> None:
        for owner, request_id in [key for key in self._runs if key[0] == client_id]:
            self.abort(request_id, client_id=owner)

    def step(self) -> list[tuple[int, EngineDelta]]:
        """Return what has arrived from vLLM, and start the requests that may start."""
        deltas, self._failed = self._failed, []
        while self._arrived:
            choice, item = self._arrived.popleft()
            if choice.ended:  # aborted meanwhile
                continue
            if isinstance(item, Exception):
                self._fail(choice, item, deltas)
            else:
                deltas.append((choice.run.client_id, self._process(choice, item)))
        self._refuse_overdue()
        if self._gate.active or self._held:
            self._gate.advance([run for run in self._runs.values() if run.started])
            deltas = self._hold(deltas)
        return deltas

    def take_refused(self) -> list[tuple[int, str, SyringaError]]:
        refused, self._refused = self._refused, []
        return refused

    def stats(self) -> EngineStats:
        limits, waiting = self._limits, self._waiting()
        interactive = (run for run in self._runs.values() if not run.request.background)
        return self._counters.stats(
            active=sum(len(run.open) for run in self._runs.values()),
            waiting=waiting,
            behind=self._waiting(background=True),
            tenants=len({run.request.tenant for run in interactive if not run.begun}) if waiting else 0,
            blocks=limits.blocks,
            block_size=limits.block_size,
            prefix_caching=limits.prefix_caching,
            length=limits.max_length,
        )

    # Outputs

    def _process(self, choice: _Choice, output: VllmOutput) -> EngineDelta:
        request, first = choice.run.request, not choice.begun
        try:
            delta = to_delta(request, choice.wanted.choice, output, first=first)
        except Exception:
            logger.exception("worker: an output of vLLM cannot be read")
            delta = failure(request, choice.wanted.choice)
            self._cancel(choice)
        choice.begun = True
        self._counters.record_delta(request, delta, first=first)
        if delta.finish is not None:
            if not choice.ended and output.outputs[0].finish_reason is None:  # it has failed here, and vLLM goes on
                self._cancel(choice)
            choice.ended = True
            self._forget_ended(choice.run)
        return delta

    def _fail(self, choice: _Choice, error: Exception, deltas: list[tuple[int, EngineDelta]]) -> None:
        """End a choice that vLLM refused or failed on. A refusal concerns the whole request."""
        run = choice.run
        told = self._to_error(error)
        if told is not None and not any(each.begun for each in run.choices.values()):
            if told.param is None and run.request.sampling.grammar is not None:  # fields are named, grammars are not
                failed = [failure(run.request, each.wanted.choice, told.message, "grammar") for each in run.open]
                deltas += [(run.client_id, each) for each in failed]
            else:
                self._refused.append((run.client_id, run.request.id, told))
            self.abort(run.request.id, client_id=run.client_id)
            return
        logger.error("worker: vLLM failed on a request: error=%s cause=%r", type(error).__name__, error.__cause__)
        deltas.append((run.client_id, failure(run.request, choice.wanted.choice)))
        choice.ended = True
        self._forget_ended(run)

    def _hold(self, deltas: list[tuple[int, EngineDelta]]) -> list[tuple[int, EngineDelta]]:
        """Hold deltas while a request is computed alone: if it crashes the worker, the others begin again."""
        self._held += deltas
        if self._gate.computes_alone:
            return []
        held, self._held = self._held, []
        return held

    # Requests

    def _waiting(self, *, background: bool = False) -> int:
        """Return the number of interactive or background choices that vLLM has not scheduled, by what it last reported.

        Until it has reported, as many run as may at a time. Background requests have the lowest priority: of those that
        have not begun, they are the ones that wait.
        """
        unbegun = sum(not each.begun for run in self._runs.values() for each in run.open)
        if not unbegun:
            return 0
        active = sum(len(run.open) for run in self._runs.values())
        unstarted = sum(len(run.open) for run in self._gate.waiting)
        waiting = min(unbegun, max(self._counters.waiting + unstarted, active - self._limits.max_running))
        background_runs = (run for run in self._runs.values() if run.request.background)
        behind = min(waiting, sum(not each.begun for run in background_runs for each in run.open))
        return behind if background else waiting - behind

    def _refuse_overdue(self) -> None:
        """Refuse the requests that have waited for longer than `queue_seconds`: of those that have not begun, the
        last ones."""
        limit, now = self._limits.queue_seconds, self._clock()
        if not limit or not (waiting := self._waiting()):
            return
        interactive = (run for run in self._runs.values() if not run.request.background)
        unbegun = [run for run in interactive if not any(each.begun for each in run.choices.values())]
        for run in sorted(unbegun, key=lambda each: (each.request.priority, each.submitted))[-waiting:]:
            waited = now - run.submitted
            if waited >= limit and not run.request.resumed:
                self.abort(run.request.id, client_id=run.client_id)
                self._refused.append((run.client_id, run.request.id, EngineOverdue(waited)))
                self._counters.counts["refused"] += 1

    def _start(self, run: _Run) -> None:
        run.started = True
        self._record_running(self.preparing)
        for choice in run.open:
            self._loop.call_soon_threadsafe(self._create_task, choice)

    def _cancel(self, choice: _Choice) -> None:
        choice.ended = True
        self._loop.call_soon_threadsafe(self._cancel_task, choice)

    def _forget_ended(self, run: _Run) -> None:
        key = run.client_id, run.request.id
        if run.ended and self._runs.get(key) is run:
            del self._runs[key]
            self._record_running(self.preparing)

    # In the event loop

    def _create_task(self, choice: _Choice) -> None:
        choice.task = self._loop.create_task(self._run(choice))

    def _cancel_task(self, choice: _Choice) -> None:
        if choice.task is not None:
            choice.task.cancel()

    async def _run(self, choice: _Choice) -> None:
        run = choice.run
        id = f"{run.client_id}-{run.request.id}-{choice.wanted.choice}"
        # vLLM orders the requests of all tenants by it: none may get ahead of those of the others.
        priority = min(max(0, run.request.priority), BACKGROUND_PRIORITY - 1)
        if run.request.background:
            priority = BACKGROUND_PRIORITY
        try:
            async for output in self._generate(choice.wanted, id, priority):
                self._put(choice, output)
        except Exception as error:
            self._put(choice, error)

    def _put(self, choice: _Choice, item: Any) -> None:
        self._arrived.append((choice, item))
        self.wake_soon()

    def wake_soon(self) -> None:
        """Wake the server after all that is ready in the event loop has run."""
        if not self._wake_scheduled:
            self._wake_scheduled = True
            self._loop.call_soon(self._wake_server)

    def _wake_server(self) -> None:
        self._wake_scheduled = False
        self._wake()
