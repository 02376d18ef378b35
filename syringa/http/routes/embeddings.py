"""The endpoints of embedding models and cross-encoders: embeddings, rerank and score."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.embeddings import request as embeddings
from syringa.api.embeddings import rerank, score
from syringa.api.models.served_model import Models, ServedModel
from syringa.config import Config
from syringa.http import dependencies
from syringa.http.dispatch import Embedding, GenerationDispatcher
from syringa.http.streaming.sse import BufferedResponse
from syringa.types import EmbeddingRequest, EmbeddingResult

T = TypeVar("T", bound=msgspec.Struct)

_INLINE_BYTES = 1 << 16  # of vectors; more are written in a thread, so that other requests do not wait


class PreparedEncoding(Protocol):
    """A validated request."""

    @property
    def request(self) -> EmbeddingRequest: ...
    @property
    def model(self) -> ServedModel: ...
    @property
    def user(self) -> str | None: ...


class ResultWriter(Protocol):
    """Writes the response to a request."""

    def render(self, result: EmbeddingResult) -> bytes:
        """Return the JSON body."""
        ...


Prepare = Callable[[T, Models, list[str], str], Awaitable[tuple[PreparedEncoding, ResultWriter]]]
"""Validates a body of an organization. The names of ignored fields are appended to the list."""


class EmbeddingRoutes:
    def __init__(self, config: Config, dispatcher: GenerationDispatcher, models: Models) -> None:
        self._config, self._dispatcher, self._models = config, dispatcher, models

    async def embeddings(self, request: Request) -> Response:
        return await self._run(request, embeddings.CreateEmbeddingRequest, embeddings.prepare_embedding_request)

    async def rerank(self, request: Request) -> Response:
        return await self._run(request, rerank.RerankRequest, rerank.prepare_rerank)

    async def rerank_v2(self, request: Request) -> Response:
        prepare = functools.partial(rerank.prepare_rerank, version="2")
        return await self._run(request, rerank.RerankRequest, prepare)

    async def score(self, request: Request) -> Response:
        return await self._run(request, score.ScoreRequest, score.prepare_score)

    async def _run(self, request: Request, wire_type: type[T], prepare: Prepare[T]) -> Response:
        body, ignored = await dependencies.read_body(request, wire_type)
        accounting = dependencies.accounting(request)
        caller = accounting.caller
        with self._dispatcher.deadline(accounting):
            prepared, writer = await prepare(body, self._models.for_key(caller.models), ignored, caller.organization)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        run = self._dispatcher.embedding(prepared.request, prepared.model, accounting, prepared.user)
        return BufferedResponse(functools.partial(run_and_write, run, writer), headers=headers)


async def run_and_write(run: Embedding, writer: ResultWriter) -> bytes:
    """Run a request, and return the body of its response."""
    result = await run()
    if len(result.values) <= _INLINE_BYTES:
        return writer.render(result)
    return await asyncio.to_thread(writer.render, result)
