"""The ASGI app: the router with the endpoints, and the middleware around it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.engine.interface import NOT_READY, EngineProvider
from syringa.http.dispatch import GenerationDispatcher
from syringa.http.endpoints import ENDPOINTS, Handlers, openapi_document
from syringa.http.middleware.auth import AuthMiddleware
from syringa.http.middleware.body_limit import BodyLimitMiddleware
from syringa.http.middleware.errors import ErrorMiddleware
from syringa.http.middleware.hosts import HostMiddleware
from syringa.http.routes.admin import AdminRoutes
from syringa.http.routes.conversations import ConversationRoutes
from syringa.http.routes.fleet import FleetRoutes
from syringa.http.routes.model_admin import ModelAdminRoutes
from syringa.http.routes.openai import OpenAIRoutes
from syringa.http.routes.replicas import ReplicaRoutes
from syringa.http.routes.response_run import ResponseRuns
from syringa.http.routes.responses import ResponseRoutes
from syringa.http.routes.server_info import ServerInfoRoutes
from syringa.http.routes.system import SystemRoutes
from syringa.http.routes.websocket import ResponsesWebSocket
from syringa.http.routing import WEBSOCKET, Router
from syringa.http.server.drain import DrainMiddleware
from syringa.service.app_state import AppState
from syringa.service.metrics.fleet_metrics import count_states
from syringa.service.metrics.status import ModelStatus
from syringa.store import ModelUsage

_EXPOSED_HEADERS = [
    "x-request-id",
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
    router = Router(ENDPOINTS, create_handlers(config, dispatcher, models, app_state), config.root_path)
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
        fleet=lambda: count_states(dispatcher.engines.fleet()),
    )
    document = functools.partial(openapi_document, secured=bool(config.api_key), root_path=config.root_path)
    return Handlers(
        openai=OpenAIRoutes(config, dispatcher, models),
        system=SystemRoutes(dispatcher.engines, models, app_state, status, document),
        info=ServerInfoRoutes(config, dispatcher.engines, models, app_state),
        responses=ResponseRoutes(runs, app_state),
        websocket=ResponsesWebSocket(runs, app_state),
        conversations=ConversationRoutes(config, app_state),
        admin=AdminRoutes(config, app_state),
        model_admin=ModelAdminRoutes(models, app_state),
        replicas=ReplicaRoutes(config, dispatcher.engines, models),
        fleet=FleetRoutes(config, dispatcher.engines),
    )


def _middleware(config: Config, app_state: AppState, router: Router) -> list[Middleware]:
    """Return the layers of the app, the outermost first."""
    layers = [
        Middleware(ErrorMiddleware, resolve=router.resolve),
        Middleware(HostMiddleware, app_state=app_state, config=config),
        Middleware(DrainMiddleware, app_state=app_state),
        Middleware(AuthMiddleware, app_state=app_state, public_metrics=config.public_metrics),
        Middleware(BodyLimitMiddleware, limit=config.max_body_bytes),
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
