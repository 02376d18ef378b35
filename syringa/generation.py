"""The one path that every endpoint shares: from prompts × choices to a stream of events.

Each prompt is one engine request. Whatever way a generation ends, what still runs for it is aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from syringa.engine.interface import Engine
from syringa.errors import EngineError, EngineOverloaded, EngineUnavailable, InvalidRequest
from syringa.events import ChoiceEvent, Event, Finished, GenerationRequest, GenerationStats, PromptScored, Usage
from syringa.output.detokenizer import TokenTables
from syringa.output.pipeline import Pipeline
from syringa.types import EngineDelta, EngineRequest

MOST_AT_ONCE = 256  # prompts of one request in the engine
_FAILURES = ("error", "abort")


Batch = Sequence[Event]
"""What one delta of the engine made; never empty."""

Emit = Callable[[Batch], None]
"""Receives events as they are produced. What it raises ends the generation."""


async def generate(engine: Engine, vocabulary: TokenTables, request: GenerationRequest, emit: Emit) -> None:
    """Runs a request. The events of a choice are in order, the choices interleaved; `Usage` comes last."""
    emit([await produce(engine, vocabulary, request, emit, GenerationStats())])


async def produce(
    engine: Engine, vocabulary: TokenTables, request: GenerationRequest, emit: Emit, trace: GenerationStats
) -> Usage:
    """The same, with `Usage` as the result, for who has something to do before the last event is told."""
    runs = [_PromptRun(engine, vocabulary, request, index) for index in range(len(request.prompts))]
    try:
        if len(runs) == 1:
            await runs[0].run(emit)
        else:
            await _together(runs, emit)
    finally:
        for run in runs:
            run.leave(trace)
    return trace.usage


async def stream(engine: Engine, vocabulary: TokenTables, request: GenerationRequest) -> AsyncGenerator[Event]:
    """The same events, for who would rather wait for them one by one."""
    queue: asyncio.Queue[Batch | None] = asyncio.Queue()
    task = asyncio.create_task(generate(engine, vocabulary, request, queue.put_nowait))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (batch := await queue.get()) is not None:
            for event in batch:
                yield event
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _together(runs: Sequence[_PromptRun], emit: Emit) -> None:
    """Several prompts at once. One that fails ends them all. A request may have more of them than an engine lets wait
    in its queue, and others wait there too: so many are sent there as can well be computed together."""
    room = asyncio.Semaphore(MOST_AT_ONCE)

    async def one(run: _PromptRun) -> None:
        async with room:
            await run.run(emit)

    tasks = [asyncio.create_task(one(run)) for run in runs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _PromptRun:
    """One prompt of a request in the engine, with the pipelines of its choices."""

    __slots__ = (
        "_choices", "_grammar_param", "_cut", "_emit", "_engine", "_first_at", "_held", "_pipelines", "_prompt", "_queued",
        "_request", "_running", "_scored", "_told", "cached_tokens", "prompt_tokens",
    )  # fmt: skip

    def __init__(self, engine: Engine, vocabulary: TokenTables, request: GenerationRequest, prompt: int) -> None:
        self.cached_tokens = 0
        self.prompt_tokens = len(request.prompts[prompt])
        self._queued = 0
        self._cut = False
        self._first_at: float | None = None
        self._engine = engine
        self._prompt = prompt
        self._choices = request.choices
        self._running = request.candidates
        self._grammar_param = request.grammar_param
        self._held: list[EngineDelta] = []
        self._told: list[Event] = []
        self._emit: Emit = self._keep
        ranked = request.candidates > request.choices
        # Candidates are ranked by their log-probability, whether or not the client wants to see it.
        logprobs = request.logprobs if request.logprobs is not None or not ranked else 0
        self._scored = request.prompt_logprobs is not None
        first = prompt * request.candidates
        self._pipelines = [
            Pipeline(
                vocabulary,
                first + each,
                stop=request.stop,
                min_tokens=request.stopping.min_tokens,
                show_tokens=request.logprobs is not None,
                output=request.output,
            )
            for each in range(request.candidates)
        ]
        self._request = EngineRequest(
            id=request.id if len(request.prompts) == 1 else f"{request.id}-{prompt}",
            prompt=request.prompts[prompt],
            sampling=request.sampling,
            stopping=request.stopping,
            choices=request.candidates,
            logprobs=logprobs,
            prompt_logprobs=request.prompt_logprobs,
            images=request.images,
            tenant=request.tenant,
        )

    def leave(self, trace: GenerationStats) -> None:
        """Adds what was done for this prompt. One that the engine never began on cost nothing."""
        if self._first_at is None:
            return
        trace.prompt_tokens += self.prompt_tokens
        trace.cached_tokens += self.cached_tokens
        trace.completion_tokens += sum([pipeline.tokens for pipeline in self._pipelines])
        trace.reasoning_tokens += sum([pipeline.reasoning_tokens for pipeline in self._pipelines])
        trace.cut |= self._cut
        trace.queued = max(trace.queued, self._queued / 1000)
        trace.first_at = self._first_at if trace.first_at is None else min(trace.first_at, self._first_at)

    async def run(self, emit: Emit) -> None:
        ranked = len(self._pipelines) > self._choices
        self._emit = self._keep if ranked else emit
        await self._engine.submit(self._request, self)
        if self._running:
            raise EngineUnavailable("The engine ended the request before it was done.")
        if ranked:
            self._tell_best(emit)

    def _score(self, delta: EngineDelta) -> bool:
        """The prompt's scores must come before any text that follows it: until they are there, everything waits."""
        self._held.append(delta)
        if delta.prompt_logprobs is None:
            self._refuse_failure(delta)
            return False
        self._emit([PromptScored(self._prompt, delta.prompt_logprobs)])
        held, self._held, self._scored = self._held, [], False
        return any([self(each) for each in held])  # noqa: C419 - every one is to be taken

    def __call__(self, delta: EngineDelta) -> bool:
        """Passes on what a delta makes. A choice that ends before the engine knows is aborted."""
        if self._first_at is None and delta.finish not in _FAILURES:
            self._first_at = time.perf_counter()
            self._queued = delta.queued_ms
        if self._scored:
            return self._score(delta)
        pipeline = self._pipelines[delta.choice]
        if pipeline.done:
            return False
        if delta.finish in _FAILURES:
            self._refuse_failure(delta)
        if delta.cached_tokens > self.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if delta.prompt_tokens:
            self.prompt_tokens = delta.prompt_tokens
        events = pipeline.feed(delta)
        if events:
            self._emit(events)
        if not events or not isinstance(events[-1], Finished):
            return False
        self._running -= 1
        self._cut |= events[-1].reason == "length"
        if delta.finish is None and self._running:
            self._engine.abort(self._request.id, delta.choice)
        return not self._running

    def _keep(self, batch: Batch) -> None:
        self._told += batch

    def _tell_best(self, emit: Emit) -> None:
        """Every candidate is drawn; the best ones are told of as if there had been no others."""
        first = self._prompt * len(self._pipelines)
        told: list[list[ChoiceEvent]] = [[] for _ in self._pipelines]
        for event in self._told:
            if isinstance(event, ChoiceEvent):
                told[event.choice - first].append(event)
            else:
                emit([event])
        ranked = sorted(range(len(told)), key=lambda each: -self._pipelines[each].mean_logprob)
        for place, each in enumerate(ranked[: self._choices]):
            index = self._prompt * self._choices + place
            emit([msgspec.structs.replace(event, choice=index) for event in told[each]])

    def _refuse_failure(self, delta: EngineDelta) -> None:
        if delta.finish == "error":
            message = delta.error or "The engine failed on this request."
            match delta.error_kind:
                case "grammar":
                    raise InvalidRequest(message, param=self._grammar_param, code="invalid_grammar")
                case "overload":
                    raise EngineOverloaded(message)
            raise EngineError(message)
        if delta.finish == "abort":
            raise EngineUnavailable("The engine gave the request up.")
