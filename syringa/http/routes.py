"""The endpoints: which path, which wire type, which answer."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from syringa.api import chat, completions, tokens
from syringa.api.common import Call, decode, header_value
from syringa.api.model import Models
from syringa.api.openapi import document
from syringa.config import Config
from syringa.engine.interface import Engine
from syringa.errors import EngineUnavailable, InvalidRequest, UnsupportedMediaType
from syringa.generation import generate
from syringa.http.route import Route
from syringa.http.sse import StreamedAnswer, WholeAnswer

T = TypeVar("T", bound=msgspec.Struct)

_PAGE = Path(__file__).with_name("docs.html")
# The page is whole in itself, and talks to nobody but this server.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Api:
    """The handlers, and what they share."""

    def __init__(self, config: Config, engine: Engine, models: Models) -> None:
        self.config, self.engine, self.models = config, engine, models

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/health", self.health),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/api/v2/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/api/v2/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.list_models),
            Route("/api/v2/models", self.list_models),
            Route("/v1/models/{id:path}", self.show_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    async def health(self, request: Request) -> Response:
        if not self.engine.ready:
            raise EngineUnavailable("The model is loading.")
        return _json({"status": "ok"})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(_PAGE.read_bytes(), headers={"content-security-policy": _PAGE_POLICY}, media_type="text/html")

    @functools.cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document(secured=bool(self.config.api_key)))

    async def chat(self, request: Request) -> Response:
        body, ignored = await self._read(request, chat.ChatRequest)
        call = await chat.to_generation(body, self.models, ignored, _tenant(request))
        return self._answer(call, self._heed(ignored))

    async def completions(self, request: Request) -> Response:
        body, ignored = await self._read(request, completions.CompletionRequest)
        call = await completions.to_generation(body, self.models, ignored, _tenant(request))
        return self._answer(call, self._heed(ignored))

    async def list_models(self, request: Request) -> Response:
        return _json(tokens.ModelList("list", [tokens.entry(model) for model in self.models.all]))

    async def show_model(self, request: Request) -> Response:
        return _json(tokens.entry(self.models.find(request.path_params["id"])))

    async def tokenize(self, request: Request) -> Response:
        return await self._small(request, tokens.TokenizeRequest, tokens.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._small(request, tokens.DetokenizeRequest, tokens.detokenize)

    async def _small(
        self, request: Request, wire: type[T], handle: Callable[[T, Models, list[str]], Awaitable[msgspec.Struct]]
    ) -> Response:
        body, ignored = await self._read(request, wire)
        answer = await handle(body, self.models, ignored)
        return _json(answer, self._heed(ignored))

    async def _read(self, request: Request, wire: type[T]) -> tuple[T, list[str]]:
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise UnsupportedMediaType(f"The body must be application/json, and is {kind}.")
        return decode(await request.body(), wire)

    def _heed(self, ignored: list[str]) -> dict[str, str]:
        """The header that names unknown fields, or the refusal that the administrator asked for instead."""
        if ignored and self.config.unknown_fields == "refuse":
            raise InvalidRequest(
                f"{ignored[0]!r} is not honoured here, and this server refuses what it would ignore.", param=ignored[0]
            )
        return {"x-syringa-ignored": header_value(ignored)} if ignored else {}

    def _answer(self, call: Call, headers: dict[str, str]) -> Response:
        run = functools.partial(generate, self.engine, call.model.tokenizer, call.request)
        timeout = self.config.request_timeout
        if call.stream:
            keep_alive = self.config.keep_alive
            return StreamedAnswer(run, call.writer, headers=headers, keep_alive=keep_alive, timeout=timeout)
        return WholeAnswer(run, call.writer, headers=headers, timeout=timeout)


def _tenant(request: Request) -> str:
    tenant: str = getattr(request.state, "tenant", "")
    return tenant


def _json(value: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")
