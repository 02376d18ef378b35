"""The ASGI app: the router with the endpoints, and the middleware around it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import cast

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.engine.interface import NOT_READY, EngineProvider
from syringa.http.batch_lines import BatchLineExecutor
from syringa.http.dispatch import GenerationDispatcher
from syringa.http.endpoints import BATCH_ENDPOINTS, ENDPOINTS, Handlers, openapi_document
from syringa.http.middleware.auth import AuthMiddleware
from syringa.http.middleware.body_limit import BodyLimitMiddleware
from syringa.http.middleware.errors import ErrorMiddleware
from syringa.http.middleware.hosts import HostMiddleware
from syringa.http.routes.admin import AdminRoutes
from syringa.http.routes.anthropic import AnthropicRoutes
from syringa.http.routes.batches import BatchRoutes
from syringa.http.routes.console import ConsoleRoutes
from syringa.http.routes.conversations import ConversationRoutes
from syringa.http.routes.embeddings import EmbeddingRoutes
from syringa.http.routes.files import FileRoutes
from syringa.http.routes.fleet import FleetRoutes
from syringa.http.routes.listings import ListingRoutes
from syringa.http.routes.me import CallerRoutes
from syringa.http.routes.model_admin import ModelAdminRoutes
from syringa.http.routes.model_pulls import ModelPullRoutes
from syringa.http.routes.models import ModelRoutes
from syringa.http.routes.ollama import OllamaRoutes
from syringa.http.routes.ollama_models import OllamaModelRoutes
from syringa.http.routes.openai import OpenAIRoutes
from syringa.http.routes.replicas import ReplicaRoutes
from syringa.http.routes.response_run import ResponseRuns
from syringa.http.routes.responses import ResponseRoutes
from syringa.http.routes.series import SeriesRoutes, read_all_stats
from syringa.http.routes.server_info import ServerInfoRoutes
from syringa.http.routes.system import SystemRoutes
from syringa.http.routes.websocket import ResponsesWebSocket
from syringa.http.routing import WEBSOCKET, Handler, Router
from syringa.http.server.drain import DrainMiddleware
from syringa.http.uploads import MAX_FIELDS, MAX_FORM_BYTES
from syringa.service.app_state import AppState
from syringa.service.metrics.fleet_metrics import summarize_fleet
from syringa.service.metrics.status import ModelStatus
from syringa.store import ModelUsage

_BOUNDARY_BYTES = 512  # of a part of a form, with what surrounds its headers
_EXPOSED_HEADERS = [
    "x-request-id",
    "request-id",
    "x-syringa-ignored",
    "retry-after",
    *(f"x-ratelimit-{name}-{unit}" for name in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
]


def create_app(
    config: Config,
    engines: EngineProvider,
    models: Models,
    app_state: AppState | None = None,
    dispatcher: GenerationDispatcher | None = None,
) -> ASGIApp:
    """Create the app that serves `models` on `engines`. The caller starts and closes the engines and `app_state`."""
    app_state = AppState(config) if app_state is None else app_state
    if dispatcher is None:
        dispatcher = GenerationDispatcher(
            engines, app_state.key_watch, config.request_timeout, share_prefix_cache=config.share_prefix_cache
        )
    handlers = create_handlers(config, dispatcher, models, app_state)
    app_state.execute_line = BatchLineExecutor(
        {each.path: (each, cast(Handler, each.handler(handlers))) for each in BATCH_ENDPOINTS}
    )
    app_state.series.read_stats = functools.partial(read_all_stats, dispatcher.engines, models)
    router = Router(ENDPOINTS, handlers, config.root_path)
    app: ASGIApp = router
    for layer in reversed(_middleware(config, app_state, router)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app


def create_handlers(config: Config, dispatcher: GenerationDispatcher, models: Models, app_state: AppState) -> Handlers:
    runs = ResponseRuns(config, dispatcher, models, app_state)

    async def read_usage(since: float) -> Sequence[ModelUsage]:
        return await app_state.store.read(lambda session: session.usage.by_model(since))

    status = ModelStatus(
        read_usage,
        lambda: [(id, id) for id in models.ids],
        is_ready=lambda model: dispatcher.engines.status(model) not in NOT_READY,
        replicas=lambda model: Counter[str](each.status for each in dispatcher.engines.replicas(model)),
        fleet=lambda: {**summarize_fleet(dispatcher.engines.fleet()), **app_state.metrics.summarize_replicas()},
    )
    ollama_models = OllamaModelRoutes(config, dispatcher.engines, models, app_state)
    document = functools.partial(openapi_document, secured=bool(config.api_key), root_path=config.root_path)
    return Handlers(
        openai=OpenAIRoutes(config, dispatcher, models),
        anthropic=AnthropicRoutes(config, dispatcher, models, app_state),
        models=ModelRoutes(models),
        embeddings=EmbeddingRoutes(config, dispatcher, models),
        ollama=OllamaRoutes(config, dispatcher, models),
        ollama_models=ollama_models,
        console=ConsoleRoutes(config),
        me=CallerRoutes(config, models, app_state),
        system=SystemRoutes(dispatcher.engines, models, app_state, status, document),
        info=ServerInfoRoutes(config, dispatcher.engines, models, app_state),
        responses=ResponseRoutes(runs, app_state),
        websocket=ResponsesWebSocket(runs, app_state),
        conversations=ConversationRoutes(config, app_state),
        listings=ListingRoutes(app_state),
        files=FileRoutes(config, app_state),
        batches=BatchRoutes(config, app_state, [each.path for each in BATCH_ENDPOINTS]),
        admin=AdminRoutes(config, app_state),
        model_admin=ModelAdminRoutes(dispatcher.engines, models, app_state),
        model_pulls=ModelPullRoutes(config, models, app_state, ollama_models.downloads),
        replicas=ReplicaRoutes(config, dispatcher.engines, models),
        fleet=FleetRoutes(config, dispatcher.engines),
        series=SeriesRoutes(app_state),
    )


def _middleware(config: Config, app_state: AppState, router: Router) -> list[Middleware]:
    """Return the layers of the app, the outermost first."""
    layers = [
        Middleware(ErrorMiddleware, resolve=router.resolve),
        Middleware(HostMiddleware, app_state=app_state, config=config),
        Middleware(DrainMiddleware, app_state=app_state),
        Middleware(AuthMiddleware, app_state=app_state, public_metrics=config.public_metrics),
        Middleware(
            BodyLimitMiddleware,
            limit=config.max_body_bytes,
            upload_limit=config.file_max_bytes + MAX_FORM_BYTES + MAX_FIELDS * _BOUNDARY_BYTES,
        ),
    ]
    if config.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=sorted({endpoint.method for endpoint in ENDPOINTS} - {WEBSOCKET}),
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )
        layers.insert(0, cors)
    return layers
