"""Lists of the stored responses and conversations of the caller's organization."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from syringa.api.responses.listing import (
    ConversationList,
    ConversationReference,
    ListedConversationObject,
    ResponseList,
    ResponseSummary,
    preview,
    read_stored_fields,
)
from syringa.errors import InvalidRequest
from syringa.http import dependencies
from syringa.service.app_state import AppState
from syringa.store import ListedConversation, ListedResponse, ResponseFilter, ResponseStatus

_PAGE = ("limit", "order", "after", "before")
_FILTERS = ("model", "status", "conversation", "previous_response_id", "background")


class ListingRoutes:
    def __init__(self, app_state: AppState) -> None:
        self._responses = app_state.responses

    async def responses(self, request: Request) -> Response:
        organization, query = dependencies.organization(request), request.query_params
        dependencies.check_parameters(query, (*_PAGE, *_FILTERS))
        page, filter = dependencies.read_page_query(query), _read_filter(query)
        found, has_more = await self._responses.store.read(
            lambda session: session.listings.responses(
                organization, filter, after=page.after, before=page.before, limit=page.limit, order=page.order
            )
        )
        # In a thread: the stored bodies may be large.
        data = await asyncio.to_thread(lambda: [_to_summary(each) for each in found])
        return dependencies.json(ResponseList(data=data, **_ends(found), has_more=has_more))

    async def conversations(self, request: Request) -> Response:
        organization, query = dependencies.organization(request), request.query_params
        dependencies.check_parameters(query, _PAGE)
        page = dependencies.read_page_query(query)
        found, has_more = await self._responses.store.read(
            lambda session: session.listings.conversations(
                organization, after=page.after, before=page.before, limit=page.limit, order=page.order
            )
        )
        data = [
            ListedConversationObject(
                id=each.id,
                created_at=each.created_at,
                metadata=msgspec.json.decode(each.metadata, type=dict[str, str]),
                items=each.items,
            )
            for each in found
        ]
        return dependencies.json(ConversationList(data=data, **_ends(found), has_more=has_more))


def _read_filter(query: QueryParams) -> ResponseFilter:
    statuses: Any = tuple(query["status"].split(",")) if "status" in query else None
    for each in statuses or ():
        if each not in get_args(ResponseStatus):
            known = ", ".join(get_args(ResponseStatus))
            raise InvalidRequest(f"status: expected some of {known}, not {each[:40]!r}.", param="status")
    return ResponseFilter(
        model=query.get("model") or None,
        statuses=statuses,
        conversation_id=query.get("conversation") or None,
        previous_id=query.get("previous_response_id") or None,
        background=dependencies.query_flag(query, "background") if "background" in query else None,
    )


def _to_summary(response: ListedResponse) -> ResponseSummary:
    stored, conversation = read_stored_fields(response.body), response.conversation_id
    return ResponseSummary(
        id=response.id,
        created_at=response.created_at,
        expires_at=response.expires_at,
        model=response.model,
        status=response.status,
        background=response.background,
        previous_response_id=response.previous_id,
        conversation=None if conversation is None else ConversationReference(id=conversation),
        usage=stored.usage,
        error=stored.error,
        incomplete_details=stored.incomplete_details,
        metadata=stored.metadata or {},
        input_preview=preview(response.input),
        output_preview=preview(response.output),
    )


def _ends(found: Sequence[ListedResponse] | Sequence[ListedConversation]) -> dict[str, str]:
    return {"first_id": found[0].id if found else "", "last_id": found[-1].id if found else ""}
