"""The Batches API: create, retrieve, list and cancel batches."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from syringa.api import batches as wire
from syringa.api.fields.common import CachedTokens, ReasoningTokens, check_metadata
from syringa.api.files import read_expiry
from syringa.config import Config
from syringa.errors import InvalidRequest, NotFound, StoreError
from syringa.http import dependencies
from syringa.http.routes.files import file_not_found
from syringa.ids import random_id
from syringa.service.app_state import AppState
from syringa.store import StoredBatch, StoredFile

if TYPE_CHECKING:
    from syringa.store.session import Session


class BatchRoutes:
    def __init__(self, config: Config, app_state: AppState, endpoints: Collection[str]) -> None:
        """`endpoints`: whose requests a batch may have."""
        self._config, self._app_state, self._endpoints = config, app_state, endpoints
        self._store = app_state.store

    async def create(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, wire.CreateBatchRequest)
        caller = dependencies.caller(request)
        seconds = wire.read_window(body.completion_window)
        output_seconds = read_expiry(body.output_expires_after, "output_expires_after")
        if body.endpoint not in self._endpoints:
            raise InvalidRequest(f"endpoint: {body.endpoint} is not served here.", param="endpoint")
        check_metadata(body.metadata or {})
        headers = dependencies.ignored_fields_header(self._config, ignored)
        now = int(time.time())
        batch = StoredBatch(
            id=random_id("batch_"),
            organization=caller.organization,
            created_at=now,
            deadline=now + seconds,
            key=caller.key,
            endpoint=body.endpoint,
            completion_window=body.completion_window,
            input_file=body.input_file_id,
            output_seconds=output_seconds,
            metadata=None if body.metadata is None else msgspec.json.encode(body.metadata).decode(),
        )

        def create(session: Session) -> None:
            _check_file(session.files.get(batch.organization, batch.input_file, lock=True), batch.input_file)
            session.batches.create(batch)

        await self._store.write(create)
        await self._scan()
        return dependencies.json(to_object(batch), headers)

    async def get(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        return dependencies.json(to_object(await self._find(organization, id)))

    async def list(self, request: Request) -> Response:
        organization = dependencies.organization(request)
        query = dependencies.read_page_query(request.query_params)
        found, has_more = await self._store.read(
            lambda session: session.batches.page(organization, after=query.after, limit=query.limit, order=query.order)
        )
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        data = [to_object(batch) for batch in found]
        return dependencies.json(wire.BatchList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def cancel(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        changed = await self._store.write(lambda session: session.batches.cancel(organization, id))
        if changed is None:
            batch = await self._find(organization, id)
            if batch.status not in ("cancelling", "cancelled"):
                raise InvalidRequest(f"A batch with the status {batch.status!r} cannot be cancelled.")
            return dependencies.json(to_object(batch))
        await self._scan()
        return dependencies.json(to_object(changed))

    async def _scan(self) -> None:
        """Let this process notice the change now. Others notice it when they poll the store."""
        with contextlib.suppress(StoreError):
            await self._app_state.batches.scan()

    async def _find(self, organization: str, id: str) -> StoredBatch:
        found = await self._store.read(lambda session: session.batches.get(organization, id))
        if found is None:
            raise NotFound(f"There is no batch {id!r}.", code="batch_not_found")
        return found


def _check_file(file: StoredFile | None, id: str) -> None:
    """Raise `NotFound` or `InvalidRequest` if a file cannot be the input of a batch."""
    if file is None:
        raise file_not_found(id, "input_file_id")
    if file.purpose != "batch":
        raise InvalidRequest(
            f"input_file_id: the file has the purpose {file.purpose!r}, not 'batch'.", param="input_file_id"
        )


def to_object(batch: StoredBatch) -> wire.BatchObject:
    metadata = None if batch.metadata is None else msgspec.json.decode(batch.metadata, type=dict[str, str])
    return wire.BatchObject(
        id=batch.id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=wire.read_errors(batch.errors),
        input_file_id=batch.input_file,
        completion_window=batch.completion_window,
        status=batch.status,
        output_file_id=batch.output_file,
        error_file_id=batch.error_file,
        created_at=batch.created_at,
        expires_at=batch.deadline,
        request_counts=wire.RequestCounts(total=batch.total, completed=batch.completed, failed=batch.failed),
        usage=wire.BatchUsage(
            input_tokens=batch.input_tokens,
            input_tokens_details=CachedTokens(batch.cached_tokens),
            output_tokens=batch.output_tokens,
            output_tokens_details=ReasoningTokens(batch.reasoning_tokens),
            total_tokens=batch.input_tokens + batch.output_tokens,
        ),
        metadata=metadata,
        **wire.read_times(batch.times),
    )


def _organization_and_id(request: Request) -> tuple[str, str]:
    return dependencies.organization(request), request.path_params["batch_id"]
