"""The app: a list of routes and a list of middleware."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException

from syringa.api.model import Models
from syringa.config import Config
from syringa.engine.interface import Engine
from syringa.http.middleware import http_exception, middleware
from syringa.http.routes import Api


def create_app(config: Config, engine: Engine, models: Models) -> Starlette:
    """An ASGI app that answers for `models` with `engine`. Neither is started or closed here."""
    app = Starlette(
        routes=Api(config, engine, models).routes(),
        middleware=middleware(config),
        exception_handlers={HTTPException: http_exception},
    )
    app.router.redirect_slashes = False
    return app
