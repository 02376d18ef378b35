"""The app: a list of routes and a list of middleware."""

from __future__ import annotations

from starlette.types import ASGIApp

from syringa.api.model import Models
from syringa.config import Config
from syringa.engine.interface import Fleet
from syringa.http.desk import Desk
from syringa.http.middleware import middleware
from syringa.http.route import Paths
from syringa.http.routes import Api
from syringa.service.work import Work


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
