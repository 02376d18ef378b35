"""Ollama's endpoints that generate: chat, generate and embeddings."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.models.served_model import Models
from syringa.api.ollama import request
from syringa.api.ollama.common import parse_keep_alive, timestamp
from syringa.api.ollama.embed import OllamaEmbeddingsRequest, OllamaEmbedRequest, PreparedEmbed, prepare_embed
from syringa.api.ollama.writer import (
    Durations,
    OllamaChatResponse,
    OllamaGenerateResponse,
    OllamaMessage,
    OllamaResponse,
    OllamaWriter,
)
from syringa.api.output_writer import PreparedRequest
from syringa.config import Config
from syringa.errors import Forbidden
from syringa.generation import Emit
from syringa.http import dependencies
from syringa.http.dispatch import GenerationDispatcher
from syringa.http.streaming.sse import LINE_FRAMING, BufferedResponse, EventStreamResponse, frame_line, generate_body
from syringa.service.auth.keys import Caller
from syringa.service.usage.accounting import RequestAccounting

T = TypeVar("T", bound=request.OllamaChatRequest | request.OllamaGenerateRequest)
B = TypeVar("B", bound=request.OllamaChatRequest | request.OllamaGenerateRequest, contravariant=True)
E = TypeVar("E", bound=OllamaEmbedRequest | OllamaEmbeddingsRequest)

_AT_ONCE = 0.001  # idle seconds after which a model is unloaded that is not to be kept


class Prepare(Protocol[B]):
    """Validates a body and returns what to generate."""

    async def __call__(self, body: B, models: Models, ignored: list[str], tenant: str) -> PreparedRequest: ...


class OllamaRoutes:
    def __init__(self, config: Config, dispatcher: GenerationDispatcher, models: Models) -> None:
        self._config, self._dispatcher, self._models = config, dispatcher, models

    async def chat(self, http: Request) -> Response:
        def respond(name: str) -> OllamaResponse:
            return OllamaChatResponse(model=name, created_at=timestamp(), message=OllamaMessage())

        return await self._generate(http, request.OllamaChatRequest, request.prepare_chat, respond)

    async def generate(self, http: Request) -> Response:
        def respond(name: str) -> OllamaResponse:
            return OllamaGenerateResponse(model=name, created_at=timestamp())

        return await self._generate(http, request.OllamaGenerateRequest, request.prepare_generate, respond)

    async def embed(self, http: Request) -> Response:
        return await self._embed(http, OllamaEmbedRequest)

    async def embeddings(self, http: Request) -> Response:
        return await self._embed(http, OllamaEmbeddingsRequest)

    async def _generate(
        self, http: Request, wire_type: type[T], prepare: Prepare[T], respond: Callable[[str], OllamaResponse]
    ) -> Response:
        """`respond` returns the response to a request that only loads or unloads the model."""
        body, ignored = await dependencies.read_body(http, wire_type, untyped=True)
        accounting = dependencies.accounting(http)
        caller = accounting.caller
        models = self._models.for_key(caller.models)
        keep_alive = _read_keep_alive(body.keep_alive, caller, ignored, is_empty=body.is_empty)
        if body.is_empty:
            model = await request.read_load_request(body, models, ignored, unload=keep_alive == 0)
            headers = dependencies.ignored_fields_header(self._config, ignored)
            load = functools.partial(self._load, model.id, keep_alive, accounting, respond(body.model))
            return BufferedResponse(load, headers=headers)
        with self._dispatcher.deadline(accounting):
            prepared = await prepare(body, models, ignored, caller.organization)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        writer = prepared.writer
        assert isinstance(writer, OllamaWriter)
        writer.durations = functools.partial(measure, accounting, accounting.elapsed())
        generation = self._keeping(
            self._dispatcher.generation_with_usage_event(prepared, accounting), prepared.model.id, keep_alive
        )
        if not prepared.stream:
            return BufferedResponse(functools.partial(generate_body, generation, writer), headers=headers)
        framing = dataclasses.replace(LINE_FRAMING, keep_alive=frame_line(writer.text_chunk("")))
        keep_open = self._config.keep_alive
        return EventStreamResponse(generation, writer.write, framing, headers=headers, keep_alive=keep_open)

    async def _load(
        self, model: str, keep_alive: float | None, accounting: RequestAccounting, response: OllamaResponse
    ) -> bytes:
        """Respond to a request without a prompt."""
        response.done, response.done_reason = True, "unload" if keep_alive == 0 else "load"
        await self._load_or_unload(model, keep_alive, accounting)
        return msgspec.json.encode(response)

    async def _load_or_unload(self, model: str, keep_alive: float | None, accounting: RequestAccounting) -> None:
        """Load a model, or unload it if it is not to be kept."""
        if keep_alive == 0:
            accounting.model = model
        else:
            await self._dispatcher.load(model, accounting)
        self._keep(model, keep_alive)

    async def _embed(self, http: Request, wire_type: type[E]) -> Response:
        body, ignored = await dependencies.read_body(http, wire_type, untyped=True)
        accounting = dependencies.accounting(http)
        caller = accounting.caller
        keep_alive = _read_keep_alive(body.keep_alive, caller, ignored, is_empty=body.is_empty)
        with self._dispatcher.deadline(accounting):
            models = self._models.for_key(caller.models)
            prepared = await prepare_embed(body, models, ignored, caller.organization)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        run = functools.partial(self._run_embedding, prepared, accounting, keep_alive)
        return BufferedResponse(run, headers=headers)

    async def _run_embedding(
        self, prepared: PreparedEmbed, accounting: RequestAccounting, keep_alive: float | None
    ) -> bytes:
        model, result = prepared.model, None
        if prepared.prepared is None:
            await self._load_or_unload(model.id, keep_alive, accounting)
        else:
            result = await self._dispatcher.embedding(prepared.prepared.request, model, accounting)()
            self._keep(model.id, keep_alive)
        return prepared.render(result, functools.partial(measure, accounting, 0.0))

    def _keeping(
        self, generate: Callable[[Emit], Awaitable[None]], model: str, keep_alive: float | None
    ) -> Callable[[Emit], Awaitable[None]]:
        """Return a generation after which a model is kept in memory as a request asks."""
        if keep_alive is None:
            return generate

        async def generate_and_keep(emit: Emit) -> None:
            try:
                await generate(emit)
            finally:
                self._keep(model, keep_alive)

        return generate_and_keep

    def _keep(self, model: str, keep_alive: float | None) -> None:
        if keep_alive is not None:
            idle_timeout = 0.0 if keep_alive == math.inf else max(_AT_ONCE, keep_alive)
            self._dispatcher.engines.keep(model, idle_timeout)


def _read_keep_alive(given: object, caller: Caller, ignored: list[str], *, is_empty: bool) -> float | None:
    """Return the seconds of `keep_alive`; None if it is absent, or concerns others than the caller.

    `is_empty`: the request does nothing but load the model, or unload it. Raises `Forbidden` if it would unload the
    model of others.
    """
    keep_alive = parse_keep_alive(given)
    if keep_alive is not None and not caller.admin:
        if keep_alive == 0 and is_empty:
            raise Forbidden("An administrator's key is needed to unload a model.", param="keep_alive")
        ignored.append("keep_alive")
        return None
    return keep_alive


def measure(accounting: RequestAccounting, prepared_after: float) -> Durations:
    """Return the durations of a request that has ended. `prepared_after`: the seconds until it was submitted."""
    total, first = accounting.total_seconds or accounting.elapsed(), accounting.first_token_seconds
    load = accounting.load_seconds
    prompt = output = 0.0
    if first is not None:
        prompt = max(0.0, first - prepared_after - load - accounting.stats.queue_seconds)
        output = max(0.0, total - first)
    return Durations(*(round(seconds * 1e9) for seconds in (total, load, prompt, output)))
