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

from syringa.api import tokenize as tokens
from syringa.api.chat import request as chat
from syringa.api.completions import request as completions
from syringa.api.decoding import Call
from syringa.api.models.served_model import Models
from syringa.api.openapi.document import document
from syringa.config import Config
from syringa.errors import EngineUnavailable
from syringa.http import dependencies
from syringa.http.dispatch import Desk
from syringa.http.routes.admin import Admin
from syringa.http.routes.conversations import Conversations
from syringa.http.routes.metrics import Observing
from syringa.http.routes.models import AdminModels
from syringa.http.routes.response_run import Turns
from syringa.http.routes.responses import Responses
from syringa.http.routes.websocket import ResponseSocket
from syringa.http.routing import Route
from syringa.http.streaming.framing import PLAIN
from syringa.http.streaming.sse import StreamedAnswer, WholeAnswer, collected
from syringa.service.app_state import Work
from syringa.service.metrics.status import Status
from syringa.service.usage.account import Account

T = TypeVar("T", bound=msgspec.Struct)

_PAGE = Path(__file__).with_name("docs.html")
# The page is whole in itself, and talks to nobody but this server.
_PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class Api:
    """The handlers, and what they share."""

    def __init__(self, config: Config, desk: Desk, models: Models, work: Work) -> None:
        self.config, self.desk, self.models, self.work = config, desk, models, work

    def routes(self) -> list[BaseRoute]:
        turns = Turns(self.config, self.desk, self.models, self.work.state)
        status = Status(self.work.state.database.usage.by_model, self._names)
        return [
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/openapi.json", self.openapi),
            Route("/docs", self.docs),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/api/v2/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/api/v2/completions", self.completions, methods=["POST"]),
            *Responses(turns, self.work).routes(),
            WebSocketRoute("/v1/responses", ResponseSocket(turns, self.work)),
            *Conversations(self.config, self.work.state).routes(),
            *Admin(self.config, self.work).routes(),
            *AdminModels(self.config, self.models, self.work).routes(),
            *Observing(self.work.metrics, status, self.desk.fleet, self._names).routes(),
            Route("/v1/models", self.list_models),
            Route("/api/v2/models", self.list_models),
            Route("/v1/models/{id:path}", self.show_model),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]

    def _names(self) -> list[tuple[str, str]]:
        return [(id, id) for id in self.models.ids]

    async def health(self, request: Request) -> Response:
        """This process lives, whatever the models do."""
        return dependencies.json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """The default model is there, or was unloaded for want of use and comes back when it is wanted."""
        if self.work.draining:
            raise EngineUnavailable("The server is being stopped.", code="server_ending")
        if self.desk.fleet.status(self.models.default) in ("loading", "failed"):
            raise EngineUnavailable("The model is loading.")
        return dependencies.json({"status": "ready"})

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(_PAGE.read_bytes(), headers={"content-security-policy": _PAGE_POLICY}, media_type="text/html")

    @functools.cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(document(secured=bool(self.config.api_key)))

    async def chat(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, chat.ChatRequest)
        account = dependencies.account(request)
        models = self.models.for_key(account.caller.models)
        call = await chat.to_generation(body, models, ignored, account.caller.organisation)
        return self._answer(call, account, dependencies.heed(self.config, ignored))

    async def completions(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, completions.CompletionRequest)
        account = dependencies.account(request)
        models = self.models.for_key(account.caller.models)
        call = await completions.to_generation(body, models, ignored, account.caller.organisation)
        return self._answer(call, account, dependencies.heed(self.config, ignored))

    async def list_models(self, request: Request) -> Response:
        models = await self.models.for_key(dependencies.caller(request).models).all()
        return dependencies.json(tokens.ModelList("list", [tokens.entry(model) for model in models]))

    async def show_model(self, request: Request) -> Response:
        models = self.models.for_key(dependencies.caller(request).models)
        return dependencies.json(tokens.entry(await models.show(request.path_params["id"])))

    async def tokenize(self, request: Request) -> Response:
        return await self._small(request, tokens.TokenizeRequest, tokens.tokenize)

    async def detokenize(self, request: Request) -> Response:
        return await self._small(request, tokens.DetokenizeRequest, tokens.detokenize)

    async def _small(
        self, request: Request, wire: type[T], handle: Callable[[T, Models, list[str]], Awaitable[msgspec.Struct]]
    ) -> Response:
        body, ignored = await dependencies.read_body(request, wire)
        answer = await handle(body, self.models.for_key(dependencies.caller(request).models), ignored)
        return dependencies.json(answer, dependencies.heed(self.config, ignored))

    def _answer(self, call: Call, account: Account, headers: dict[str, str]) -> Response:
        run = self.desk.run(call, account)
        if call.stream:
            keep_alive = self.config.keep_alive
            write, around = call.writer.write, call.writer.around_text
            return StreamedAnswer(run, write, PLAIN, headers=headers, keep_alive=keep_alive, around=around)
        return WholeAnswer(functools.partial(collected, run, call.writer), headers=headers)
