"""Ollama's endpoints about models: lists, descriptions, downloads, and models that are made of others."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.models.loading import describe_model
from syringa.api.models.registry import ModelRegistry
from syringa.api.models.served_model import ALL_KINDS, ModelCard, Models
from syringa.api.models.specs import pulled_fields
from syringa.api.ollama import manage
from syringa.api.ollama.common import VERSION, find_model, ids_of, model_not_found, new_model_id
from syringa.api.ollama.files import ModelFileFacts, read_facts, unknown_facts
from syringa.api.ollama.manage import OllamaProgress
from syringa.api.ollama.models import (
    OllamaModelList,
    OllamaRunningModel,
    OllamaRunningModels,
    OllamaShowRequest,
    list_entry,
    running_entry,
    show_model,
)
from syringa.api.ollama.pull import ModelPulls, OllamaPullRequest, name_to_pull
from syringa.config import Config, ModelSpec
from syringa.engine.interface import EngineProvider
from syringa.errors import InvalidRequest, NotFound, StartupError, SyringaError
from syringa.http import dependencies
from syringa.http.routes.model_admin import check_reserved
from syringa.http.routes.system import read_engine_stats
from syringa.http.streaming.sse import LINE_FRAMING, BufferedResponse, EventStreamResponse, frame_line
from syringa.http.streaming.writer import ClientDisconnected
from syringa.service.app_state import AppState
from syringa.service.model_catalog import ModelCatalog

_GPU_KERNELS = ("triton", "cuda", "vllm")
_NOT_CHANGEABLE = "The models of this server cannot be changed at run time."


class OllamaModelRoutes:
    def __init__(
        self,
        config: Config,
        engines: EngineProvider,
        models: Models,
        app_state: AppState,
        pulls: ModelPulls | None = None,
    ) -> None:
        self._config, self._engines, self._models, self._app_state = config, engines, models, app_state
        self._pulls = pulls or ModelPulls()
        self.downloads = self._pulls.downloads

    async def version(self, http: Request) -> Response:
        return dependencies.json({"version": VERSION})

    async def list(self, http: Request) -> Response:
        cards = await self._for_caller(http).all()
        facts = await asyncio.gather(*(self._facts(card.id) for card in cards))
        return dependencies.json(OllamaModelList([list_entry(*each) for each in zip(cards, facts, strict=True)]))

    async def running(self, http: Request) -> Response:
        """List the models in memory."""
        cards = [
            card
            for card in await self._for_caller(http).all()
            if self._engines.status(card.id) in ("loaded", "hanging")
        ]
        return dependencies.json(OllamaRunningModels(list(await asyncio.gather(*map(self._running_entry, cards)))))

    async def show(self, http: Request) -> Response:
        body, ignored = await dependencies.read_body(http, OllamaShowRequest, untyped=True)
        name = manage.required_name(body.model, body.name)
        ignored += [each for each in ("verbose", "system", "template", "options") if getattr(body, each)]
        models = self._for_caller(http)
        model = await find_model(lambda each: models.find(each, ALL_KINDS), name)
        shown = show_model(model, self._specs().get(model.id), await self._facts(model.id))
        return dependencies.json(shown, dependencies.ignored_fields_header(self._config, ignored))

    async def pull(self, http: Request) -> Response:
        body, ignored = await dependencies.read_body(http, OllamaPullRequest, untyped=True)
        ignored += [each for each in ("insecure", "username", "password") if getattr(body, each)]
        headers = dependencies.ignored_fields_header(self._config, ignored)
        name = manage.required_name(body.model, body.name)
        source = name_to_pull(name)
        self._catalog()  # before anything is downloaded
        pull = functools.partial(self._pull, new_model_id(name), source)
        if body.stream is False:
            return BufferedResponse(functools.partial(_run_silently, pull), headers=headers)
        return EventStreamResponse(pull, lambda line: (line,), LINE_FRAMING, headers=headers, keep_alive=0.0)

    async def create(self, http: Request) -> Response:
        body, ignored = await dependencies.read_body(http, manage.OllamaCreateRequest, untyped=True)
        id = new_model_id(manage.required_name(body.model, body.name))
        manage.check_create(body, ignored)
        base = await self._spec(body.from_ or "")
        fields = manage.copied_fields(base, self._config) | await manage.changed_fields(body, base, ignored)
        spec, card = await self._describe(id, fields)
        if spec.context_limit > (card.max_model_len or 0) and body.parameters and body.parameters.get("num_ctx"):
            ignored.append("parameters.num_ctx")
        headers = dependencies.ignored_fields_header(self._config, ignored)
        await self._catalog().put(spec, fields)
        lines = manage.progress_lines()
        if body.stream is False:
            return dependencies.json(lines[-1], headers)
        content = b"".join(map(frame_line, lines))
        return Response(content, headers=headers, media_type=LINE_FRAMING.content_type.decode())

    async def copy(self, http: Request) -> Response:
        body, ignored = await dependencies.read_body(http, manage.OllamaCopyRequest, untyped=True)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        id = new_model_id(body.destination, "destination")
        await self._put(id, manage.copied_fields(await self._spec(body.source), self._config))
        return Response(headers=headers)

    async def delete(self, http: Request) -> Response:
        """Remove a model. Its running requests may finish, and its files stay."""
        body, ignored = await dependencies.read_body(http, manage.OllamaDeleteRequest, untyped=True)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        name = manage.required_name(body.model, body.name)
        catalog, specs = self._catalog(), self._specs()
        id = next((each for each in ids_of(name) if each in specs), None)  # not by an alias, which may be a pattern
        if id is None:
            raise model_not_found(name)
        if not await catalog.delete(id):
            raise InvalidRequest(f"The model {id!r} is defined in the settings: remove it there.", param="model")
        return Response(headers=headers)

    async def push(self, http: Request) -> Response:
        raise InvalidRequest("Models cannot be pushed from this server.")

    async def create_blob(self, http: Request) -> Response:
        raise InvalidRequest("Files cannot be uploaded: put them on the server, or pull them with /api/pull.")

    async def find_blob(self, http: Request) -> Response:
        raise NotFound("Files cannot be uploaded: there are no blobs.")

    async def _pull(self, id: str, source: str, emit: Callable[[Sequence[Any]], None]) -> None:
        """Download a model and add it to those of the server, unless it is one of them."""

        def report(line: OllamaProgress) -> None:
            with contextlib.suppress(ClientDisconnected):  # the task is canceled soon
                emit([line])

        report(OllamaProgress(status="pulling manifest"))
        await self._pulls.run(source, report)
        report(OllamaProgress(status="verifying sha256 digest"))
        report(OllamaProgress(status="writing manifest"))
        names = {"default", *(name for spec in self._registry().specs for name in (spec.id, *spec.aliases))}
        if id not in names:  # patterns among them do not count
            try:
                fields = await asyncio.to_thread(pulled_fields, source, self._config)
            except StartupError as error:
                raise manage.creation_error(error) from None
            await self._put(id, fields)
        report(OllamaProgress(status="success"))

    async def _put(self, id: str, fields: dict[str, Any]) -> None:
        """Add a model, or replace one that was added. Raises `InvalidRequest`."""
        spec, _ = await self._describe(id, fields)
        await self._catalog().put(spec, fields)

    async def _describe(self, id: str, fields: dict[str, Any]) -> tuple[ModelSpec, ModelCard]:
        """Return the configuration and the description of a model that is to be added. Raises `InvalidRequest`."""
        registry, catalog = self._registry(), self._catalog()
        check_reserved(id)
        try:
            spec = catalog.read(id, fields)
            registry.check_names(spec)
            return spec, await asyncio.to_thread(describe_model, spec, int(time.time()))
        except StartupError as error:
            raise manage.creation_error(error) from None

    async def _running_entry(self, card: ModelCard) -> OllamaRunningModel:
        stats = await read_engine_stats(self._engines, card.id)
        kernels = ""
        with contextlib.suppress(SyringaError):
            engine = self._engines.engine(card.id)
            kernels = (await engine.wait_ready()).info.kernels if engine.ready else ""
        return running_entry(
            card,
            await self._facts(card.id),
            idle_seconds=stats.idle_seconds if stats is not None else 0.0,
            idle_timeout=self._engines.idle_timeout(card.id),
            on_gpu=kernels.startswith(_GPU_KERNELS),
        )

    async def _facts(self, model: str) -> ModelFileFacts:
        spec = self._specs().get(model)
        return unknown_facts(model) if spec is None else await asyncio.to_thread(read_facts, spec.path)

    async def _spec(self, name: str) -> ModelSpec:
        """Return the configuration of a model. Raises `NotFound`."""
        specs = self._specs()
        card = await find_model(self._models.show, name)
        if card.id not in specs:
            raise InvalidRequest(_NOT_CHANGEABLE) if not specs else model_not_found(name)
        return specs[card.id]

    def _specs(self) -> Mapping[str, ModelSpec]:
        """Return the configurations of all models by id; none where they cannot be changed."""
        return {spec.id: spec for spec in self._models.specs} if isinstance(self._models, ModelRegistry) else {}

    def _registry(self) -> ModelRegistry:
        if not isinstance(self._models, ModelRegistry):
            raise InvalidRequest(_NOT_CHANGEABLE)
        return self._models

    def _catalog(self) -> ModelCatalog:
        if self._app_state.catalog is None:
            raise InvalidRequest(_NOT_CHANGEABLE)
        return self._app_state.catalog

    def _for_caller(self, http: Request) -> Models:
        return self._models.for_key(dependencies.caller(http).models)


async def _run_silently(pull: Callable[[Callable[[Sequence[Any]], None]], Awaitable[None]]) -> bytes:
    """Run a download, and return the body of its response."""
    await pull(lambda lines: None)
    return msgspec.json.encode(OllamaProgress(status="success"))
