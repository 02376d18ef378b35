"""Generation: run the prompts and choices of a request in an engine, as a stream of events.

Every endpoint uses this path. Each prompt is one engine request; however a generation ends, `Engine.submit` aborts
what still runs of it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import TypeVar

import msgspec

from syringa.beam_search import Beam, BeamSearch
from syringa.engine.interface import Engine
from syringa.errors import OUT_OF_MEMORY_CODE, EngineError, EngineOverloaded, EngineUnavailable, InvalidRequest
from syringa.events import ChoiceEvent, Event, Finished, GenerationRequest, GenerationStats, PromptScored, Usage
from syringa.ids import random_id
from syringa.output.batching_pipeline import BatchingPipeline
from syringa.output.detokenizer import TokenTables
from syringa.output.pipeline import Pipeline
from syringa.types import EngineDelta, EngineRequest, Image, SamplingParams, StopConditions, TokenLogprobs

T = TypeVar("T")

MAX_CONCURRENT_PROMPTS = 256  # of one request
_FAILURES = ("error", "abort")


Batch = Sequence[Event]
"""The events of one engine delta; never empty."""

Emit = Callable[[Batch], None]
"""Receives events as they are produced. An exception that it raises ends the generation."""


async def generate(engine: Engine, tokenizer: TokenTables, request: GenerationRequest, emit: Emit) -> None:
    """Run a request and emit its events.

    The events of a choice are in order, choices are interleaved, and `Usage` is the last event.
    """
    emit([await run_generation(engine, tokenizer, request, emit, GenerationStats())])


async def run_generation(
    engine: Engine,
    tokenizer: TokenTables,
    request: GenerationRequest,
    emit: Emit,
    stats: GenerationStats,
    *,
    share_cache: bool = False,
) -> Usage:
    """Like `generate`, but return `Usage` instead of emitting it, and fill in `stats` however the generation ends.

    With `share_cache`, cached prefixes are shared with other tenants.
    """
    key = cache_key(None if share_cache else request.tenant, request.cache_salt)
    kind = _PromptGeneration if request.beam_length_penalty is None else _BeamGeneration
    runs = [kind(engine, tokenizer, request, index, key) for index in range(len(request.prompts))]
    try:
        if len(runs) == 1:
            await runs[0].run(emit)
        else:
            await _run_concurrently(runs, emit)
    finally:
        for run in runs:
            run.add_to(stats)
    return stats.usage


def cache_key(tenant: str | None, salt: str | None) -> bytes:
    """Return the key that finds the cached prefixes, images and grammars of a tenant, or of all tenants for None.

    The parts are hashed as JSON, which keeps them apart: neither `("a", "bc")` and `("ab", "c")` nor an absent and an
    empty salt have the same key.
    """
    return hashlib.blake2b(msgspec.json.encode((tenant, salt)), digest_size=16).digest()


async def count_prompt(
    engine: Engine,
    prompt: list[int],
    images: tuple[Image, ...],
    *,
    tenant: str,
    share_cache: bool = False,
    waited: float = 0.0,
) -> int:
    """Return the number of tokens of a prompt with its images, without computing it."""
    found = 0

    def receive(delta: EngineDelta) -> bool:
        nonlocal found
        _raise_failure(delta, "")
        found = delta.prompt_tokens
        return True

    request = EngineRequest(
        id=random_id("count_"),
        prompt=prompt,
        sampling=SamplingParams(seed=0),
        stopping=StopConditions(max_tokens=1),
        images=images,
        count_only=True,
        tenant=tenant,
        waited=waited,
        cache_key=cache_key(None if share_cache else tenant, None),
    )
    await engine.submit(request, receive)
    if not found:
        raise EngineUnavailable("The engine ended the request before it was done.")
    return found


async def stream_events(engine: Engine, tokenizer: TokenTables, request: GenerationRequest) -> AsyncGenerator[Event]:
    """Like `generate`, as an asynchronous generator."""
    queue: asyncio.Queue[Batch | None] = asyncio.Queue()
    task = asyncio.create_task(generate(engine, tokenizer, request, queue.put_nowait))
    task.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (batch := await queue.get()) is not None:
            for event in batch:
                yield event
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run_concurrently(runs: Sequence[_PromptGeneration], emit: Emit) -> None:
    """Run several prompts; the first failure ends them all.

    The number in flight is bounded: a request may have more prompts than the engine's queue accepts.
    """
    slots = asyncio.Semaphore(MAX_CONCURRENT_PROMPTS)

    async def run_one(run: _PromptGeneration) -> None:
        async with slots:
            await run.run(emit)

    await _gather([run_one(run) for run in runs])


async def _gather(coroutines: Iterable[Coroutine[None, None, T]]) -> list[T]:
    """Run coroutines concurrently and return their results; the first failure ends them all."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _PromptGeneration:
    """One prompt of a request in the engine, with the output pipelines of its choices."""

    __slots__ = (
        "_cached_tokens", "_choices", "_emit", "_engine", "_first_token_at", "_grammar_param", "_held_deltas",
        "_kept_events", "_pipelines", "_prompt", "_prompt_tokens", "_queue_ms", "_report_start", "_request", "_running",
        "_truncated", "_wants_prompt_logprobs",
    )  # fmt: skip

    def __init__(
        self, engine: Engine, tokenizer: TokenTables, request: GenerationRequest, prompt: int, key: bytes
    ) -> None:
        self._cached_tokens = 0
        self._prompt_tokens = len(request.prompts[prompt])
        self._queue_ms = 0
        self._truncated = False
        self._first_token_at: float | None = None
        self._engine = engine
        self._prompt = prompt
        self._choices = request.choices
        self._running = request.candidates
        self._grammar_param = request.grammar_param
        self._report_start = request.report_start
        self._held_deltas: list[EngineDelta] = []  # until the prompt's log-probabilities arrive
        self._kept_events: list[Event] = []  # until the candidates are ranked
        self._emit: Emit = self._keep
        ranked = request.candidates > request.choices
        # Candidates are ranked by log-probability, whether or not the client asked for it.
        logprobs = request.logprobs if request.logprobs is not None or not ranked else 0
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        first = prompt * request.candidates
        stopping = request.stopping
        stop_tokens = stopping.stop_tokens if stopping.ignore_eos else stopping.stop_tokens - stopping.end_tokens
        pipeline: Callable[..., Pipeline] = Pipeline
        if request.stream_interval > 1:
            pipeline = functools.partial(BatchingPipeline, interval=request.stream_interval)
        self._pipelines = [
            pipeline(
                tokenizer,
                first + each,
                stop=request.stop,
                stop_tokens=stop_tokens,
                min_tokens=request.stopping.min_tokens,
                show_tokens=request.logprobs is not None,
                include_stop=request.include_stop,
                show_special=request.show_special,
                space_special=request.space_special,
                report_tokens=request.report_tokens,
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
            logprob_tokens=request.logprob_tokens,
            prompt_logprobs=request.prompt_logprobs,
            images=request.images,
            tenant=request.tenant,
            priority=request.priority,
            background=request.background,
            waited=request.waited,
            cache_key=key,
            use_cache=request.use_cache,
        )

    def add_to(self, stats: GenerationStats) -> None:
        """Add what was computed for this prompt; nothing if the engine never started it."""
        if self._first_token_at is None:
            return
        stats.prompt_tokens += self._prompt_tokens
        stats.cached_tokens += self._cached_tokens
        lengths = [pipeline.tokens for pipeline in self._pipelines]
        stats.completion_tokens += sum(lengths)
        stats.longest_choice = max(stats.longest_choice, *lengths)
        stats.reasoning_tokens += sum([pipeline.reasoning_tokens for pipeline in self._pipelines])
        stats.truncated |= self._truncated
        stats.queue_seconds = max(stats.queue_seconds, self._queue_ms / 1000)
        first = self._first_token_at
        stats.first_token_at = first if stats.first_token_at is None else min(stats.first_token_at, first)

    async def run(self, emit: Emit) -> None:
        ranked = len(self._pipelines) > self._choices
        self._emit = self._keep if ranked else emit
        await self._engine.submit(self._request, self)
        if self._running:
            raise EngineUnavailable("The engine ended the request before it was done.")
        if ranked:
            self._emit_best(emit)

    def __call__(self, delta: EngineDelta) -> bool:
        """Process a delta of the engine; return whether all choices are finished.

        A choice that ends at a stop string, which the engine does not know, is aborted there.
        """
        if self._first_token_at is None and delta.finish not in _FAILURES:
            self._first_token_at = time.perf_counter()
            self._queue_ms = delta.queued_ms
            if self._report_start:
                self._emit([Usage(delta.prompt_tokens or self._prompt_tokens, 0, delta.cached_tokens)])
        if self._wants_prompt_logprobs:
            return self._hold_for_prompt_logprobs(delta)
        pipeline = self._pipelines[delta.choice]
        if pipeline.done:
            return False
        if delta.finish in _FAILURES:
            self._raise_failure(delta)
        if delta.cached_tokens > self._cached_tokens:
            self._cached_tokens = delta.cached_tokens
        if delta.prompt_tokens:
            self._prompt_tokens = delta.prompt_tokens
        events = pipeline.feed(delta)
        if events:
            self._emit(events)
        if not events or not isinstance(events[-1], Finished):
            return False
        self._running -= 1
        self._truncated |= events[-1].reason == "length"
        if delta.finish is None and self._running:
            self._engine.abort(self._request.id, delta.choice)
        return not self._running

    def _hold_for_prompt_logprobs(self, delta: EngineDelta) -> bool:
        """Hold deltas until the prompt's log-probabilities arrive, which are emitted before any text."""
        self._held_deltas.append(delta)
        if delta.prompt_logprobs is None:
            self._raise_failure(delta)
            return False
        self._emit([PromptScored(self._prompt, delta.prompt_logprobs)])
        held, self._held_deltas, self._wants_prompt_logprobs = self._held_deltas, [], False
        return any([self(each) for each in held])  # noqa: C419 - every delta must be processed

    def _keep(self, batch: Batch) -> None:
        self._kept_events += batch

    def _emit_best(self, emit: Emit) -> None:
        """Emit the events of the likeliest candidates, numbered as if they were the only choices."""
        first = self._prompt * len(self._pipelines)
        kept: list[list[ChoiceEvent]] = [[] for _ in self._pipelines]
        for event in self._kept_events:
            if isinstance(event, ChoiceEvent):
                kept[event.choice - first].append(event)
            else:
                emit([event])
        ranked = sorted(range(len(kept)), key=lambda each: -self._pipelines[each].mean_logprob)
        for rank, each in enumerate(ranked[: self._choices]):
            index = self._prompt * self._choices + rank
            emit([msgspec.structs.replace(event, choice=index) for event in kept[each]])

    def _raise_failure(self, delta: EngineDelta) -> None:
        _raise_failure(delta, self._grammar_param)


def _raise_failure(delta: EngineDelta, grammar_param: str) -> None:
    """Raise the error of a delta, if it has one. `grammar_param`: the field that a grammar came from."""
    if delta.finish == "error":
        message = delta.error or "The engine failed on this request."
        match delta.error_kind:
            case "grammar":
                raise InvalidRequest(message, param=grammar_param, code="invalid_grammar")
            case "no_token":
                raise InvalidRequest(message, param="allowed_token_ids")
            case "overload":
                raise EngineOverloaded(message)
            case "out_of_memory":
                raise EngineOverloaded(message, code=OUT_OF_MEMORY_CODE)
            case "unavailable":
                raise EngineUnavailable(message)
        raise EngineError(message)
    if delta.finish == "abort":
        raise EngineUnavailable("The engine aborted the request.")


class _BeamGeneration(_PromptGeneration):
    """Beam search for one prompt of a request. Every step is an engine request per beam, for one token.

    What beams have in common is found in the prefix cache. The choices are emitted when the search is done.
    """

    __slots__ = ("_search",)

    def __init__(
        self, engine: Engine, tokenizer: TokenTables, request: GenerationRequest, prompt: int, key: bytes
    ) -> None:
        super().__init__(engine, tokenizer, request, prompt, key)
        self._search = BeamSearch(request.choices, request.beam_length_penalty or 0.0, request.stopping)

    def add_to(self, stats: GenerationStats) -> None:
        super().add_to(stats)
        if not self._pipelines[0].done:  # the search failed or was canceled
            stats.completion_tokens += sum([len(beam.tokens) for beam in self._search.beams])

    async def run(self, emit: Emit) -> None:
        request = self._request
        if not request.stopping.max_tokens:  # only prompt log-probabilities were requested
            await super().run(emit)
            return
        search = self._search
        # Only the log-probabilities count: the token that the engine samples is not used.
        alternatives = max(search.alternatives, request.logprobs or 0)
        step_request = msgspec.structs.replace(
            request, choices=1, logprobs=alternatives, stopping=StopConditions(max_tokens=1)
        )
        prompt_logprobs = request.prompt_logprobs
        for step in itertools.count():
            if search.done:
                break
            steps = [
                msgspec.structs.replace(
                    step_request,
                    id=f"{request.id}-{step}-{index}",
                    prompt=[*request.prompt, *beam.tokens],
                    prompt_logprobs=prompt_logprobs,
                )
                for index, beam in enumerate(search.beams)
            ]
            first, *_ = deltas = await _gather(map(self._run_step, steps))
            if step == 0:
                self._observe_first_step(first, emit)
                prompt_logprobs = None
                step_request = msgspec.structs.replace(step_request, waited=0.0)
            search.expand([delta.logprobs[0] for delta in deltas])
        self._emit_beams(search.best(), emit)

    async def _run_step(self, request: EngineRequest) -> EngineDelta:
        received: list[EngineDelta] = []

        def receive(delta: EngineDelta) -> bool:
            self._raise_failure(delta)
            received.append(delta)
            return True

        await self._engine.submit(request, receive)
        if not received or not received[0].logprobs:
            raise EngineUnavailable("The engine ended the request before it was done.")
        return received[0]

    def _observe_first_step(self, delta: EngineDelta, emit: Emit) -> None:
        self._first_token_at = time.perf_counter()
        self._queue_ms, self._cached_tokens = delta.queued_ms, delta.cached_tokens
        if delta.prompt_logprobs is not None:
            emit([PromptScored(self._prompt, delta.prompt_logprobs)])

    def _emit_beams(self, beams: Sequence[Beam], emit: Emit) -> None:
        count = self._request.logprobs
        for pipeline, beam in zip(self._pipelines, beams, strict=False):
            logprobs = [TokenLogprobs(each.token, each.logprob, each.top[:count]) for each in beam.logprobs]
            stop_token = beam.tokens[-1] if beam.finish == "stop" else None
            events = pipeline.feed(
                EngineDelta(
                    self._request.id,
                    0,
                    list(beam.tokens),
                    logprobs if count is not None else [],
                    beam.finish,
                    stop_token,
                )
            )
            self._truncated |= beam.finish == "length"
            emit(events)
