"""Anthropic's Messages API: messages, and the count of their tokens."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.anthropic.prepare import MessageContext, count_message_tokens, prepare_message
from syringa.api.anthropic.request import CountTokensRequest, MessageRequest
from syringa.api.error_formats import error_body
from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.http import dependencies
from syringa.http.context import request_context
from syringa.http.dispatch import GenerationDispatcher
from syringa.http.streaming.sse import BufferedResponse, EventStreamResponse, Framing, frame_named_event, generate_body
from syringa.service.app_state import AppState

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class AnthropicRoutes:
    def __init__(self, config: Config, dispatcher: GenerationDispatcher, models: Models, app_state: AppState) -> None:
        self._config, self._dispatcher, self._models = config, dispatcher, models
        self._responses = app_state.responses

    async def create_message(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, MessageRequest)
        accounting = dependencies.accounting(request)
        caller = accounting.caller
        with self._dispatcher.deadline(accounting):
            prepared = await prepare_message(
                body, self._models.for_key(caller.models), ignored, self._context(caller.organization)
            )
        headers = dependencies.ignored_fields_header(self._config, ignored)
        generation = self._dispatcher.generation_with_usage_event(prepared, accounting)
        if not prepared.stream:
            return BufferedResponse(functools.partial(generate_body, generation, prepared.writer), headers=headers)
        return EventStreamResponse(
            generation,
            prepared.writer.write,
            _framing(request_context(request.scope).request_id),
            headers=headers,
            keep_alive=self._config.keep_alive,
        )

    async def count_tokens(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, CountTokensRequest)
        caller = dependencies.caller(request)
        counted = await count_message_tokens(
            body,
            self._models.for_key(caller.models),
            ignored,
            self._context(caller.organization),
            self._dispatcher.prompt_counter(caller, request_context(request.scope)),
        )
        return dependencies.json(counted, dependencies.ignored_fields_header(self._config, ignored))

    def _context(self, organization: str) -> MessageContext:
        return MessageContext(tenant=organization, cipher=functools.partial(self._responses.cipher, organization))


def _framing(request_id: str) -> Framing:
    def fail(error: Exception) -> bytes:
        return frame_named_event(error_body(error, "anthropic", request_id))

    return Framing(_frame, fail, keep_alive=_PING)


def _frame(event: Any) -> bytes:
    """Frame an event under its name. Text that is encoded already is that of a `content_block_delta`."""
    if type(event) is msgspec.Raw:
        return b"event: content_block_delta\ndata: %b\n\n" % event
    return frame_named_event(event)
