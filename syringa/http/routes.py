"""The endpoints: which path, which wire type, which answer."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, WebSocketRoute

from syringa.api import chat, completions, tokens
from syringa.api.common import Call
from syringa.api.model import Models
from syringa.api.openapi import document
from syringa.config import Config
from syringa.engine.interface import Engine
from syringa.errors import EngineUnavailable
from syringa.generation import generate
from syringa.http import reading
from syringa.http.conversations import Conversations
from syringa.http.framing import PLAIN
from syringa.http.responses import Responses
from syringa.http.route import Route
from syringa.http.sse import StreamedAnswer, WholeAnswer, collected
from syringa.http.turns import Turns
from syringa.http.websocket import ResponseSocket
from syringa.service.work import Work

T = TypeVar("T", bound=msgspec.Struct)

_PAGE = Path(__file__).with_name("docs.html")
# The page is whole in itself, and talks to nobody but this server.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Api:
    """The handlers, and what they share."""

    def __init__(self, config: Config, engine: Engine, models: Models, work: Work) -> None:
        self.config, self.engine, self.models, self.work = config, engine, models, work

    def routes(self) -> list[BaseRoute]:
        turns = Turns(self.config, self.engine, self.models, self.work.state)
        return [
            Route("/health", self.health),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/api/v2/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/api/v2/completions", self.completions, methods=["POST"]),
            *Responses(turns, self.work).routes(),
            WebSocketRoute("/v1/responses", ResponseSocket(turns)),
            *Conversations(self.config, self.work.state).routes(),
            Route("/v1/models", self.list_models),
            Route("/api/v2/models", self.list_models),
            Route("/v1/models/{id:path}", self.show_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        if not self.engine.ready:
            raise EngineUnavailable("The model is loading.")
        return reading.json({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(_PAGE.read_bytes(), headers={"content-security-policy": _PAGE_POLICY}, media_type="text/html")

    @functools.cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document(secured=bool(self.config.api_key)))

    async def chat(self, request: Request) -> Response:
        body, ignored = await reading.read_body(request, chat.ChatRequest)
        call = await chat.to_generation(body, self.models, ignored, reading.organisation(request))
        return self._answer(call, reading.heed(self.config, ignored))

    async def completions(self, request: Request) -> Response:
        body, ignored = await reading.read_body(request, completions.CompletionRequest)
        call = await completions.to_generation(body, self.models, ignored, reading.organisation(request))
        return self._answer(call, reading.heed(self.config, ignored))

    async def list_models(self, request: Request) -> Response:
        return reading.json(tokens.ModelList("list", [tokens.entry(model) for model in self.models.all]))

    async def show_model(self, request: Request) -> Response:
        return reading.json(tokens.entry(self.models.find(request.path_params["id"])))

    async def tokenize(self, request: Request) -> Response:
        return await self._small(request, tokens.TokenizeRequest, tokens.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._small(request, tokens.DetokenizeRequest, tokens.detokenize)

    async def _small(
        self, request: Request, wire: type[T], handle: Callable[[T, Models, list[str]], Awaitable[msgspec.Struct]]
    ) -> Response:
        body, ignored = await reading.read_body(request, wire)
        answer = await handle(body, self.models, ignored)
        return reading.json(answer, reading.heed(self.config, ignored))

    def _answer(self, call: Call, headers: dict[str, str]) -> Response:
        run = functools.partial(generate, self.engine, call.model.tokenizer, call.request)
        timeout = self.config.request_timeout
        if call.stream:
            keep_alive = self.config.keep_alive
            return StreamedAnswer(
                run, call.writer.write, PLAIN, headers=headers, keep_alive=keep_alive, timeout=timeout
            )
        return WholeAnswer(functools.partial(collected, run, call.writer, timeout), headers=headers)
