"""`/v1/me`: who the caller is, and what it may do."""

from __future__ import annotations

import contextlib

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.me import CallerEntry, CallerKey, CallerLimits, LimitsEntry, Scope, ServerEntry
from syringa.api.models.served_model import Models
from syringa.config import Config
from syringa.errors import Forbidden, StoreError
from syringa.http import dependencies
from syringa.http.middleware.auth import check_admin
from syringa.service.app_state import AppState
from syringa.service.auth.keys import Caller, RateLimits
from syringa.version import installed_version


class CallerRoutes:
    def __init__(self, config: Config, models: Models, app_state: AppState) -> None:
        self._config, self._models, self._app_state = config, models, app_state

    async def me(self, request: Request) -> Response:
        caller = dependencies.caller(request)
        scopes: list[Scope] = ["inference"]
        with contextlib.suppress(Forbidden):
            check_admin(caller, request.headers)
            scopes.append("admin")
        entry = CallerEntry(
            keys_required=self._app_state.keys.required,
            organization=caller.organization or None,
            key=await self._key(caller),
            scopes=scopes,
            models=None if caller.models is None else sorted(caller.models),
            limits=CallerLimits(organization=_limits(caller.rates), key=_limits(caller.key_rates)),
            server=ServerEntry(
                version=installed_version(), cluster=self._config.cluster, default_model=self._models.default
            ),
        )
        return dependencies.json(entry, {"cache-control": "no-store"})

    async def _key(self, caller: Caller) -> CallerKey | None:
        """Return what is known of the caller's key. It is valid also while the database is not available."""
        if not caller.key:
            return None
        found, store = None, self._app_state.store
        with contextlib.suppress(StoreError):
            if not store.location.is_empty():
                found = await store.read(lambda session: session.keys.get(caller.key))
        if found is None:
            return CallerKey(id=caller.key)
        return CallerKey(
            id=found.id, name=found.name, hint=found.hint, created_at=found.created_at, expires_at=found.expires_at
        )


def _limits(rates: RateLimits) -> LimitsEntry:
    return LimitsEntry(**msgspec.structs.asdict(rates))
