"""`/admin`: keys, organisations and usage, for administrators; and `/v1/usage`, where everybody sees their own."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, get_args
from urllib.parse import urlsplit

from msgspec import UNSET
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from syringa.api.admin import (
    KeyEntry,
    KeyList,
    KeyRequest,
    NewKey,
    OrganisationEntry,
    OrganisationList,
    OrganisationRequest,
    UsageEntry,
    UsageList,
    shown,
)
from syringa.config import Config, is_loopback
from syringa.errors import Forbidden, InvalidRequest, NotFound
from syringa.http import dependencies
from syringa.http.routing import Handler, Route
from syringa.service.app_state import Work
from syringa.service.auth import keys
from syringa.service.auth.caller import Rates
from syringa.store import Grouping, UsageFilter

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")
_QUESTIONS = ("by", "since", "until", "key", "model", "format")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


class Admin:
    """The handlers."""

    def __init__(self, config: Config, work: Work) -> None:
        self._config, self._work = config, work
        self._store = work.state.database

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/admin/keys", self._guarded(self.list_keys)),
            Route("/admin/keys", self._guarded(self.create_key), methods=["POST"]),
            Route("/admin/keys/{key_id}", self._guarded(self.show_key)),
            Route("/admin/keys/{key_id}", self._guarded(self.revoke_key), methods=["DELETE"]),
            Route("/admin/organisations", self._guarded(self.list_organisations)),
            Route("/admin/organisations/{organisation_id}", self._guarded(self.show_organisation)),
            Route("/admin/organisations/{organisation_id}", self._guarded(self.set_organisation), methods=["PUT"]),
            Route("/admin/usage", self._guarded(self.usage)),
            Route("/v1/usage", self.own_usage),
        ]

    def _guarded(self, handle: Handler) -> Handler:
        async def checked(request: Request) -> Response:
            check_admin(request)
            return await handle(request)

        return checked

    # Keys

    async def create_key(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, KeyRequest)
        headers = dependencies.heed(self._config, ignored)
        rates = Rates(**{name: getattr(body, name) or 0 for name in _LIMITS})
        key, stored = keys.mint(
            body.organisation,
            name=body.name or "",
            admin=bool(body.admin),
            models=body.models,
            rates=rates,
            expires_at=body.expires_at,
        )
        await self._store.keys.create(stored)
        return dependencies.json(shown(stored, NewKey, key=key), headers | {"cache-control": "no-store"})

    async def list_keys(self, request: Request) -> Response:
        query = request.query_params
        found = await self._store.keys.all(query.get("organisation") or None)
        if not dependencies.truth(query, "revoked"):
            found = [key for key in found if key.revoked_at is None]
        return dependencies.json(KeyList(data=[shown(key, KeyEntry) for key in found]))

    async def show_key(self, request: Request) -> Response:
        id = request.path_params["key_id"]
        found = await self._store.keys.get(id)
        if found is None:
            raise _no_key(id)
        return dependencies.json(shown(found, KeyEntry))

    async def revoke_key(self, request: Request) -> Response:
        """Every process refuses it within a second."""
        id = request.path_params["key_id"]
        found = await self._store.keys.revoke(id)
        if found is None:
            raise _no_key(id)
        return dependencies.json(shown(found, KeyEntry))

    # Organisations

    async def list_organisations(self, request: Request) -> Response:
        found = await self._store.organisations.all()
        return dependencies.json(OrganisationList(data=[shown(each, OrganisationEntry) for each in found]))

    async def show_organisation(self, request: Request) -> Response:
        id = request.path_params["organisation_id"]
        found = await self._store.organisations.get(id)
        if found is None:
            raise NotFound(f"There is no organisation {id!r}.", code="organisation_not_found")
        return dependencies.json(shown(found, OrganisationEntry))

    async def set_organisation(self, request: Request) -> Response:
        id = request.path_params["organisation_id"]
        keys.check_organisation(id)
        body, ignored = await dependencies.read_body(request, OrganisationRequest)
        headers = dependencies.heed(self._config, ignored)
        limits = {name: _limit(getattr(body, name)) for name in _LIMITS}
        found = await self._store.organisations.set(id, **limits)
        return dependencies.json(shown(found, OrganisationEntry), headers)

    # Usage

    async def usage(self, request: Request) -> Response:
        check_query(request.query_params, (*_QUESTIONS, "organisation"))
        return await self._usage(request.query_params, request.query_params.get("organisation") or None)

    async def own_usage(self, request: Request) -> Response:
        """Whoever asks sees their organisation, and no other."""
        check_query(request.query_params, _QUESTIONS)
        return await self._usage(request.query_params, dependencies.organisation(request))

    async def _usage(self, query: QueryParams, organisation: str | None) -> Response:
        by: list[Any] = query.get("by", "day").split(",")
        for each in by:
            if each not in get_args(Grouping):
                known = ", ".join(get_args(Grouping))
                raise InvalidRequest(f"by: expected some of {known}, not {each[:40]!r}.", param="by")
        kind = query.get("format", "json")
        if kind not in ("json", "csv"):
            raise InvalidRequest(f"format: expected json or csv, not {kind[:40]!r}.", param="format")
        which = UsageFilter(
            since=_moment(query, "since"),
            until=_moment(query, "until"),
            organisation=organisation,
            key=query.get("key") or None,
            model=query.get("model") or None,
        )
        found = await self._store.usage.sums(by, which)
        if kind == "csv":
            return Response(_csv(found, by), media_type="text/csv")
        return dependencies.json(UsageList(data=[shown(each, UsageEntry) for each in found]))


def check_query(query: QueryParams, known: Sequence[str]) -> None:
    """A filter with a wrong name would give numbers that mean something else."""
    for name in query:
        if name not in known:
            raise InvalidRequest(f"{name[:40]!r}: expected some of {', '.join(known)}.", param=name[:40])


def check_admin(request: Request) -> None:
    """Where keys are needed, an administrator's. Where none is, only programs on this machine may: a page of another
    site could otherwise have a visitor's browser manage the server that runs beside it."""
    caller = dependencies.caller(request)
    if not caller.admin:
        raise Forbidden("An administrator's key is needed: make one with `syringa keys create --admin`.")
    if caller.key:
        return
    given = request.headers
    foreign = given.get("sec-fetch-site", "none") not in ("none", "same-origin")
    if foreign or not _is_local(given.get("origin", "http://localhost")):
        raise Forbidden("Pages of other sites may not manage this server.")
    if not _is_local("//" + given.get("host", "")):  # a name of another site's may lead here, too
        raise Forbidden("Without keys, the server is managed from its own machine alone: use its loopback address.")


def _is_local(url: str) -> bool:
    try:
        host = urlsplit(url).hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


def _limit(given: Any) -> Any:
    """Absent: stays as it is."""
    if given is None:
        return UNSET
    return None if given == "default" else given


def _moment(query: QueryParams, name: str) -> float | None:
    """A time: `2026-01-31`, RFC 3339, seconds since 1970, or a span before now such as `7d`."""
    text = (query.get(name) or "").strip()
    if not text:
        return None
    try:
        if text[-1] in _UNITS and text[:-1].isascii() and text[:-1].isdigit():
            return (datetime.now(UTC) - timedelta(**{_UNITS[text[-1]]: int(text[:-1])})).timestamp()
        if text.isascii() and text.replace(".", "", 1).isdigit() and "-" not in text:
            return float(text)
        found = datetime.fromisoformat(text)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{name}: expected a date (2026-01-31), a time (RFC 3339), seconds or a span (7d), not {text[:40]!r}.",
            param=name,
        ) from None


def _csv(rows: list[Any], by: list[str]) -> str:
    counted = [name for name in UsageEntry.__struct_fields__ if name not in get_args(Grouping)]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow([*by, *counted])
    for row in rows:
        table.writerow([_cell(getattr(row, name)) for name in (*by, *counted)])
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Text that a spreadsheet would take for a formula is marked as text."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def _no_key(id: str) -> NotFound:
    return NotFound(f"There is no key {id!r}.", code="key_not_found")
