"""Administration of API keys and organizations, and usage reports."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime, timedelta
from typing import Any, get_args

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.admin import (
    KeyEntry,
    KeyList,
    KeyRequest,
    NewKey,
    OrganizationEntry,
    OrganizationList,
    OrganizationRequest,
    UsageEntry,
    UsageList,
    to_wire,
)
from syringa.config import Config
from syringa.errors import InvalidRequest, NotFound
from syringa.http import dependencies
from syringa.service.app_state import AppState
from syringa.service.auth import keys
from syringa.service.auth.keys import RateLimits
from syringa.store import Grouping, UsageFilter

_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent")
_USAGE_PARAMETERS = ("by", "since", "until", "key", "model", "format")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}


class AdminRoutes:
    def __init__(self, config: Config, app_state: AppState) -> None:
        self._config, self._app_state, self._store = config, app_state, app_state.store

    # Keys

    async def create_key(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, KeyRequest)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        rates = RateLimits(**{name: getattr(body, name) or 0 for name in _LIMITS})
        key, stored = keys.create_api_key(
            body.organization,
            name=body.name or "",
            admin=bool(body.admin),
            models=body.models,
            rates=rates,
            expires_at=body.expires_at,
        )
        await self._store.write(lambda session: session.keys.create(stored))
        await self._app_state.refresh_keys()
        return dependencies.json(to_wire(stored, NewKey, key=key), headers | {"cache-control": "no-store"})

    async def list_keys(self, request: Request) -> Response:
        query = request.query_params
        dependencies.check_parameters(query, ("organization", "revoked"))
        organization = query.get("organization") or None
        found = await self._store.read(lambda session: session.keys.all(organization))
        if not dependencies.query_flag(query, "revoked"):
            found = [key for key in found if key.revoked_at is None]
        return dependencies.json(KeyList(data=[to_wire(key, KeyEntry) for key in found]))

    async def show_key(self, request: Request) -> Response:
        id = request.path_params["key_id"]
        found = await self._store.read(lambda session: session.keys.get(id))
        if found is None:
            raise _key_not_found(id)
        return dependencies.json(to_wire(found, KeyEntry))

    async def revoke_key(self, request: Request) -> Response:
        """Revoke a key. Every process rejects it and ends what it has started within a second."""
        id = request.path_params["key_id"]
        found = await self._store.write(lambda session: session.keys.revoke(id))
        if found is None:
            raise _key_not_found(id)
        await self._app_state.refresh_keys()
        return dependencies.json(to_wire(found, KeyEntry))

    # Organizations

    async def list_organizations(self, request: Request) -> Response:
        found = await self._store.read(lambda session: session.organizations.all())
        return dependencies.json(OrganizationList(data=[to_wire(each, OrganizationEntry) for each in found]))

    async def show_organization(self, request: Request) -> Response:
        id = request.path_params["organization_id"]
        found = await self._store.read(lambda session: session.organizations.get(id))
        if found is None:
            raise NotFound(f"There is no organization {id!r}.", code="organization_not_found")
        return dependencies.json(to_wire(found, OrganizationEntry))

    async def set_organization(self, request: Request) -> Response:
        id = request.path_params["organization_id"]
        keys.check_organization(id)
        body, ignored = await dependencies.read_body(request, OrganizationRequest)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        given = {name: getattr(body, name) for name in _LIMITS}
        limits = {name: None if limit == "default" else limit for name, limit in given.items() if limit is not None}
        found = await self._store.write(lambda session: session.organizations.set_limits(id, limits))
        await self._app_state.refresh_keys()
        return dependencies.json(to_wire(found, OrganizationEntry), headers)

    # Usage

    async def usage(self, request: Request) -> Response:
        dependencies.check_parameters(request.query_params, (*_USAGE_PARAMETERS, "organization"))
        return await self._usage(request.query_params, request.query_params.get("organization") or None)

    async def own_usage(self, request: Request) -> Response:
        """Report the usage of the caller's own organization."""
        dependencies.check_parameters(request.query_params, _USAGE_PARAMETERS)
        return await self._usage(request.query_params, dependencies.organization(request))

    async def _usage(self, query: QueryParams, organization: str | None) -> Response:
        by: list[Any] = query.get("by", "day").split(",")
        for each in by:
            if each not in get_args(Grouping):
                known = ", ".join(get_args(Grouping))
                raise InvalidRequest(f"by: expected some of {known}, not {each[:40]!r}.", param="by")
        kind = query.get("format", "json")
        if kind not in ("json", "csv"):
            raise InvalidRequest(f"format: expected json or csv, not {kind[:40]!r}.", param="format")
        usage_filter = UsageFilter(
            since=_parse_time(query, "since"),
            until=_parse_time(query, "until"),
            organization=organization,
            key=query.get("key") or None,
            model=query.get("model") or None,
        )
        with_keys = "key" in by
        sums, found = await self._store.read(
            lambda session: (session.usage.sums(by, usage_filter), session.keys.all(organization) if with_keys else [])
        )
        names: dict[str | None, str] = {each.id: each.name or each.hint for each in found}
        rows = [to_wire(each, UsageEntry, key_name=names.get(each.key)) for each in sums]
        if kind == "csv":
            return Response(_to_csv(rows, by), media_type="text/csv")
        return dependencies.json(UsageList(data=rows))


def _parse_time(query: QueryParams, name: str) -> float | None:
    """Return a Unix time. Accepts `2026-01-31`, RFC 3339, Unix seconds, and an age such as `7d`."""
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
            f"{name}: expected a date (2026-01-31), a time (RFC 3339), seconds or an age (7d), not {text[:40]!r}.",
            param=name,
        ) from None


def _to_csv(rows: list[UsageEntry], by: list[str]) -> str:
    groups = [name for each in by for name in (("key", "key_name") if each == "key" else (each,))]
    figures = [name for name in UsageEntry.__struct_fields__ if name not in (*get_args(Grouping), "key_name")]
    out = io.StringIO()
    table = csv.writer(out, lineterminator="\n")
    table.writerow([*groups, *figures])
    for row in rows:
        table.writerow([_csv_cell(getattr(row, name)) for name in (*groups, *figures)])
    return out.getvalue()


def _csv_cell(value: Any) -> Any:
    """Quote text that a spreadsheet would interpret as a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def _key_not_found(id: str) -> NotFound:
    return NotFound(f"There is no key {id!r}.", code="key_not_found")
