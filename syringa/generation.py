"""The one path that every endpoint shares: from prompts × choices to a stream of events.

Each prompt is one engine request. Whatever way a generation ends, what still runs for it is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

import msgspec

from syringa.engine.interface import Engine
from syringa.errors import EngineError, EngineOverloaded, EngineUnavailable, InvalidRequest
from syringa.events import ChoiceEvent, Event, Finished, GenerationRequest, PromptScored, Usage
from syringa.output.detokenizer import Vocabulary
from syringa.output.pipeline import Pipeline
from syringa.types import EngineDelta, EngineRequest


async def generate(engine: Engine, vocabulary: Vocabulary, request: GenerationRequest) -> AsyncGenerator[Event]:
    """Runs a request. The events of a choice are in order, the choices interleaved; `Usage` comes last."""
    runs = [_PromptRun(engine, vocabulary, request, index) for index in range(len(request.prompts))]
    if len(runs) == 1:
        async with contextlib.aclosing(runs[0].events()) as events:
            async for event in events:
                yield event
    else:
        async with contextlib.aclosing(_merge(runs)) as events:
            async for event in events:
                yield event
    yield Usage(
        prompt_tokens=sum(map(len, request.prompts)),
        completion_tokens=sum(run.completion_tokens for run in runs),
        cached_tokens=sum(run.cached_tokens for run in runs),
    )


class _PromptRun:
    """One prompt of a request in the engine, with the pipelines of its choices."""

    def __init__(self, engine: Engine, vocabulary: Vocabulary, request: GenerationRequest, prompt: int) -> None:
        self.cached_tokens = 0
        self._engine = engine
        self._prompt = prompt
        self._choices = request.choices
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
                tool_format=request.tool_format,
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
            tenant=request.tenant,
        )

    @property
    def completion_tokens(self) -> int:
        return sum(pipeline.tokens for pipeline in self._pipelines)

    def events(self) -> AsyncGenerator[Event]:
        return self._as_they_come() if len(self._pipelines) == self._choices else self._best()

    async def _as_they_come(self) -> AsyncGenerator[Event]:
        stream = self._engine.submit(self._request)
        running = len(self._pipelines)
        held: list[EngineDelta] | None = [] if self._scored else None
        try:
            async for delta in stream:
                deltas = [delta]
                if held is not None:
                    # The prompt's scores must come before any text that follows it.
                    held.append(delta)
                    if delta.prompt_logprobs is None:
                        self._refuse_failure(delta)
                        continue
                    yield PromptScored(self._prompt, delta.prompt_logprobs)
                    deltas, held = held, None
                for each in deltas:
                    pipeline = self._pipelines[each.choice]
                    if pipeline.done:
                        continue
                    self._refuse_failure(each)
                    if each.cached_tokens > self.cached_tokens:
                        self.cached_tokens = each.cached_tokens
                    events = pipeline.feed(each)
                    for event in events:
                        yield event
                    if events and isinstance(events[-1], Finished):
                        running -= 1
                        if each.finish is None and running:
                            self._engine.abort(self._request.id, each.choice)
                if not running:
                    return
            raise EngineUnavailable("The engine ended the request before it was done.")
        finally:
            if running:
                self._engine.abort(self._request.id)
            await stream.aclose()

    async def _best(self) -> AsyncGenerator[Event]:
        """Draws every candidate, then tells of the best ones as if there had been no others."""
        first = self._prompt * len(self._pipelines)
        told: list[list[ChoiceEvent]] = [[] for _ in self._pipelines]
        async with contextlib.aclosing(self._as_they_come()) as events:
            async for event in events:
                if isinstance(event, ChoiceEvent):
                    told[event.choice - first].append(event)
                else:
                    yield event
        ranked = sorted(range(len(told)), key=lambda each: -self._pipelines[each].mean_logprob)
        for place, each in enumerate(ranked[: self._choices]):
            index = self._prompt * self._choices + place
            for event in told[each]:
                yield msgspec.structs.replace(event, choice=index)

    def _refuse_failure(self, delta: EngineDelta) -> None:
        if delta.finish == "error":
            message = delta.error or "The engine failed on this request."
            match delta.fault:
                case "grammar":
                    raise InvalidRequest(message, param="grammar")
                case "overload":
                    raise EngineOverloaded(message)
            raise EngineError(message)
        if delta.finish == "abort":
            raise EngineUnavailable("The engine gave the request up.")


async def _merge(runs: list[_PromptRun]) -> AsyncGenerator[Event]:
    """The events of several prompts as they come. One that fails ends them all."""
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(maxsize=64)

    async def pump(run: _PromptRun) -> None:
        try:
            async with contextlib.aclosing(run.events()) as events:
                async for event in events:
                    await queue.put(event)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(run)) for run in runs]
    try:
        left = len(runs)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
