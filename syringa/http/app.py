"""The app: a list of routes and a list of middleware."""

from __future__ import annotations

from starlette.types import ASGIApp

from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.engine.interface import Fleet
from syringa.http.dispatch import Desk
from syringa.http.middleware.errors import middleware
from syringa.http.routes.openai import Api
from syringa.http.routing import Paths
from syringa.service.app_state import Work


def create_app(
    config: Config, fleet: Fleet, models: Models, work: Work | None = None, desk: Desk | None = None
) -> ASGIApp:
    """An ASGI app that answers for `models` with the engines of `fleet`. Neither is started or closed here, nor is
    `work`, where responses are kept and run in the background."""
    work = Work(config) if work is None else work
    api = Api(config, Desk(fleet, config.request_timeout) if desk is None else desk, models, work)
    app: ASGIApp = Paths(api.routes())
    for layer in reversed(middleware(config, work)):
        app = layer.cls(app, *layer.args, **layer.kwargs)
    return app
