"""The dispatcher: starts every generation of every endpoint, and enforces its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import time
from collections.abc import Collection, Iterator
from typing import Any, Protocol

import msgspec

from syringa.api.chat.prompt import CountImages
from syringa.api.models.served_model import ServedModel
from syringa.api.output_writer import PreparedRequest, ToolRounds
from syringa.engine.interface import Engine, EngineProvider
from syringa.errors import EngineUnavailable, InvalidRequest, RequestSuspected
from syringa.events import GenerationRequest, Usage
from syringa.generation import Emit, count_prompt, run_generation
from syringa.http.context import RequestContext
from syringa.http.middleware.access_log import log_output
from syringa.http.middleware.errors import shutdown_error
from syringa.http.streaming.cancellation import CancelScope
from syringa.http.streaming.writer import ClientDisconnected
from syringa.service.auth.key_watch import KeyWatch
from syringa.service.auth.keys import Caller
from syringa.service.usage.accounting import RequestAccounting
from syringa.types import EmbeddingRequest, EmbeddingResult, Image

logger = logging.getLogger("syringa.service")

TIMEOUT_HEADER = "x-syringa-timeout"
_MAX_PROMPTS_LOGGED = 16


class Generation(Protocol):
    """Runs a request: passes its events to `emit`, and returns its usage."""

    async def __call__(self, emit: Emit) -> Usage: ...


class GenerationWithUsageEvent(Protocol):
    """Like `Generation`, but emits `Usage` as the last event instead of returning it."""

    async def __call__(self, emit: Emit) -> None: ...


class Embedding(Protocol):
    """Runs a request of an embedding model or a cross-encoder, and returns its result."""

    async def __call__(self) -> EmbeddingResult: ...


class GenerationDispatcher:
    """Runs requests on the engines of their models.

    A request fails with the code `timeout` after the shorter of the server's `request_timeout` and the client's
    `x-syringa-timeout`, with `server_ending` when the server stops, and with `invalid_api_key` when its key is revoked
    or expires.
    """

    def __init__(
        self, engines: EngineProvider, key_watch: KeyWatch, timeout: float = 0.0, *, share_prefix_cache: bool = False
    ) -> None:
        """`timeout`: seconds a request may take; 0: unlimited."""
        self.engines = engines
        self._key_watch = key_watch
        self._share_prefix_cache = share_prefix_cache
        self._timeout = timeout or math.inf
        self._running: set[CancelScope] = set()
        self._stopped = False

    def generation(self, prepared: PreparedRequest, accounting: RequestAccounting) -> Generation:
        """Return a function that runs the request and returns its usage."""
        request = prepared.request
        accounting.model, accounting.user = prepared.model.id, request.user
        accounting.choices, accounting.max_tokens = request.choices, request.stopping.max_tokens
        return functools.partial(self._run, prepared, accounting)

    def generation_with_usage_event(
        self, prepared: PreparedRequest, accounting: RequestAccounting
    ) -> GenerationWithUsageEvent:
        """Like `generation`, but emit `Usage` as the last event instead of returning it."""
        generate = self.generation(prepared, accounting)

        async def generate_with_usage_event(emit: Emit) -> None:
            emit([await generate(emit)])

        return generate_with_usage_event

    def embedding(
        self, request: EmbeddingRequest, model: ServedModel, accounting: RequestAccounting, user: str | None = None
    ) -> Embedding:
        """Return a function that runs a request of an embedding model or a cross-encoder and returns its result."""
        accounting.model, accounting.user = model.id, user
        return functools.partial(self._embed, request, accounting)

    async def load(self, model: str, accounting: RequestAccounting) -> None:
        """Load a model, unless it is in memory, for a request that asks for nothing else."""
        accounting.model = model
        with self._running_request(accounting):
            engine = self.engines.engine(model)
            await _load(engine, accounting)

    def prompt_counter(self, caller: Caller, context: RequestContext) -> CountImages:
        """Return a function that counts prompts with images. Nothing is generated, so nothing is metered."""
        accounting = RequestAccounting([], caller, context.endpoint.path, context.request_id)
        return functools.partial(self._count_prompt, accounting)

    async def _count_prompt(
        self, accounting: RequestAccounting, model: str, prompt: list[int], images: tuple[Image, ...]
    ) -> int:
        """Return the number of tokens of a prompt with its images. A model that is not in memory is loaded."""
        accounting.model = model
        with self._running_request(accounting):
            engine = self.engines.engine(model)
            waited = await _load(engine, accounting)
            tenant, share_cache = accounting.caller.organization, self._share_prefix_cache
            return await count_prompt(engine, prompt, images, tenant=tenant, share_cache=share_cache, waited=waited)

    def stop(self) -> None:
        """Fail all running requests, and every later one, because the server stops."""
        self._stopped = True
        for scope in self._running:
            scope.cancel(shutdown_error())

    @contextlib.contextmanager
    def deadline(self, accounting: RequestAccounting) -> Iterator[CancelScope]:
        """Cancel the block when the request has taken too long, counted from its arrival."""
        # A line of a batch waits as long as others have something to do.
        timeout = math.inf if accounting.background else min(self._timeout, accounting.timeout or math.inf)
        with CancelScope() as scope:
            if timeout < math.inf:
                late = EngineUnavailable(f"The request took longer than {timeout:g} seconds.", code="timeout")
                scope.cancel_after(max(0.0, timeout - accounting.elapsed()), late)
            yield scope

    @contextlib.contextmanager
    def _running_request(self, accounting: RequestAccounting) -> Iterator[None]:
        """Run the block under the deadline of a request, until the server stops or its key ends, and account for it."""
        try:
            if self._stopped:
                raise shutdown_error()
            with self.deadline(accounting) as scope:
                self._running.add(scope)
                try:
                    with self._key_watch.watching(accounting.caller, scope.cancel):
                        yield
                finally:
                    self._running.discard(scope)
        except (asyncio.CancelledError, ClientDisconnected):
            accounting.cancel()
            raise
        except Exception as error:
            accounting.fail(error)
            raise
        finally:
            accounting.close()  # before the end of the response is sent

    async def _run(self, prepared: PreparedRequest, accounting: RequestAccounting, emit: Emit) -> Usage:
        try:
            with self._running_request(accounting):
                if prepared.rounds is not None:
                    return await self._generate_rounds(prepared, prepared.rounds, accounting, emit)
                return await self._generate(prepared, prepared.request, accounting, emit)
        except RequestSuspected:
            _log_suspected(_describe_generation(prepared.request), accounting)
            raise

    async def _embed(self, request: EmbeddingRequest, accounting: RequestAccounting) -> EmbeddingResult:
        try:
            with self._running_request(accounting):
                engine = self.engines.engine(accounting.model)
                waited = await _load(engine, accounting)
                request = msgspec.structs.replace(request, background=accounting.background, waited=waited)
                result = await engine.embed(request)
                accounting.stats.prompt_tokens = sum(map(len, request.inputs))
                accounting.stats.queue_seconds = result.queued_ms / 1000
                return result
        except RequestSuspected:
            lengths = [len(tokens) for tokens in request.inputs[:_MAX_PROMPTS_LOGGED]]
            _log_suspected({"inputs": len(request.inputs), "input_tokens": lengths}, accounting)
            raise

    async def _generate_rounds(
        self, prepared: PreparedRequest, rounds: ToolRounds, accounting: RequestAccounting, emit: Emit
    ) -> Usage:
        """Run the generations of a request one after the other. Their usage adds up."""
        try:
            request = await rounds.begin(emit)
            while request is not None:
                await self._generate(prepared, request, accounting, emit)
                request = await rounds.next(emit, accounting.stats.completion_tokens)
        finally:
            rounds.close()
        return accounting.stats.usage

    async def _generate(
        self, prepared: PreparedRequest, request: GenerationRequest, accounting: RequestAccounting, emit: Emit
    ) -> Usage:
        engine = self.engines.engine(prepared.model.id)
        waited = await _load(engine, accounting)
        request = msgspec.structs.replace(request, background=accounting.background, waited=waited)
        share_cache = self._share_prefix_cache
        with log_output(emit) as emit:
            return await run_generation(
                engine, prepared.model.tokenizer, request, emit, accounting.stats, share_cache=share_cache
            )


def _describe_generation(request: GenerationRequest) -> dict[str, Any]:
    """Return the parameters of a request, without its content."""
    # Tokens are content: of those in the parameters, their number is logged.
    sampling = {
        name: len(value) if isinstance(value, Collection) else value
        for name, value in msgspec.structs.asdict(request.sampling).items()
    }
    if (grammar := request.sampling.grammar) is not None:
        sampling["grammar"] = f"{grammar.kind}, {len(grammar.value)} characters"
    return {
        "prompt_tokens": [len(prompt) for prompt in request.prompts[:_MAX_PROMPTS_LOGGED]],
        "images": len(request.images),
        "max_tokens": request.stopping.max_tokens,
        "choices": request.candidates,
        "logprobs": request.logprobs,
        "prompt_logprobs": request.prompt_logprobs,
        "sampling": sampling,
    }


def _log_suspected(parameters: dict[str, Any], accounting: RequestAccounting) -> None:
    """Log the parameters of a request that has crashed workers."""
    fields: dict[str, Any] = {
        "endpoint": accounting.endpoint,
        "organization": accounting.caller.organization,
        "model": accounting.model,
        **parameters,
    }
    details = " ".join(f"{name}={value}" for name, value in fields.items())
    extra = {"fields": fields, "request_id": accounting.request_id}
    logger.error("request suspected of crashing model workers: %s", details, extra=extra)


def parse_timeout(value: bytes | None) -> float | None:
    """Return the seconds of an `x-syringa-timeout` header. Raises `InvalidRequest`."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        shown = value[:40].decode("latin-1")
        raise InvalidRequest(f"{TIMEOUT_HEADER}: expected seconds above 0, not {shown!r}.", param=TIMEOUT_HEADER)
    return seconds


async def _load(engine: Engine, accounting: RequestAccounting) -> float:
    """Wait until a model is loaded, and account for the time. Return the part of it that counts as time in a queue."""
    if engine.ready:
        return 0.0
    started_at, waited = time.perf_counter(), 0.0
    try:
        _, waited = await engine.wait_ready(background=accounting.background)
    finally:
        accounting.load_seconds = max(0.0, time.perf_counter() - started_at - waited)
    return waited
