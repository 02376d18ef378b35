"""The OpenAI endpoints for chat completions and completions; and tokenization."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api import tokenize as tokens
from syringa.api.chat import request as chat
from syringa.api.completions import request as completions
from syringa.api.models.served_model import Models
from syringa.api.output_writer import PreparedRequest
from syringa.config import Config
from syringa.http import dependencies
from syringa.http.dispatch import GenerationDispatcher
from syringa.http.streaming.sse import DATA_FRAMING, BufferedResponse, EventStreamResponse, generate_body
from syringa.service.usage.accounting import RequestAccounting

T = TypeVar("T", bound=msgspec.Struct)
B = TypeVar("B", bound=msgspec.Struct, contravariant=True)


class Prepare(Protocol[B]):
    """Validates a body and returns what to generate."""

    async def __call__(
        self, body: B, models: Models, ignored: list[str], tenant: str, *, always_include_usage: bool
    ) -> PreparedRequest: ...


class OpenAIRoutes:
    def __init__(self, config: Config, dispatcher: GenerationDispatcher, models: Models) -> None:
        self._config, self._dispatcher, self._models = config, dispatcher, models

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, chat.ChatRequest, chat.prepare_chat)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, completions.CompletionRequest, completions.prepare_completion)

    async def tokenize(self, request: Request) -> Response:
        return await self._convert(request, tokens.TokenizeRequest, tokens.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._convert(request, tokens.DetokenizeRequest, tokens.detokenize)

    async def _convert(
        self,
        request: Request,
        wire_type: type[T],
        handle: Callable[[T, Models, list[str], str], Awaitable[msgspec.Struct]],
    ) -> Response:
        body, ignored = await dependencies.read_body(request, wire_type)
        caller = dependencies.caller(request)
        result = await handle(body, self._models.for_key(caller.models), ignored, caller.organization)
        return dependencies.json(result, dependencies.ignored_fields_header(self._config, ignored))

    async def _generate(self, request: Request, wire_type: type[T], prepare: Prepare[T]) -> Response:
        body, ignored = await dependencies.read_body(request, wire_type)
        accounting = dependencies.accounting(request)
        caller = accounting.caller
        with self._dispatcher.deadline(accounting):
            prepared = await prepare(
                body,
                self._models.for_key(caller.models),
                ignored,
                caller.organization,
                always_include_usage=self._config.always_include_usage,
            )
        return self._respond(prepared, accounting, dependencies.ignored_fields_header(self._config, ignored))

    def _respond(self, prepared: PreparedRequest, accounting: RequestAccounting, headers: dict[str, str]) -> Response:
        generation = self._dispatcher.generation_with_usage_event(prepared, accounting)
        if prepared.stream:
            keep_alive = self._config.keep_alive
            write = prepared.writer.write
            return EventStreamResponse(generation, write, DATA_FRAMING, headers=headers, keep_alive=keep_alive)
        return BufferedResponse(functools.partial(generate_body, generation, prepared.writer), headers=headers)
