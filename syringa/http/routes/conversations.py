"""`/v1/conversations` and their items."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from syringa.api.conversations import (
    ConversationObject,
    CreateConversationRequest,
    CreateItemsRequest,
    DeletedConversation,
    UpdateConversationRequest,
    new_conversation_id,
    read_items,
    read_metadata,
)
from syringa.api.responses import Context, ResponseRequest, referenced
from syringa.config import Config
from syringa.errors import NotFound
from syringa.http import dependencies
from syringa.http.routes.responses import check_include, listed
from syringa.http.routing import Route
from syringa.service.responses import history
from syringa.service.responses.encryption import NoSeal
from syringa.service.responses.state import State
from syringa.store import Conversation, Page

_PATH = "/v1/conversations/{conversation_id}"


class Conversations:
    """The handlers."""

    def __init__(self, config: Config, state: State) -> None:
        self._config, self._state = config, state

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/conversations", self.create, methods=["POST"]),
            Route(_PATH, self.get),
            Route(_PATH, self.update, methods=["POST"]),
            Route(_PATH, self.delete, methods=["DELETE"]),
            Route(f"{_PATH}/items", self.list_items),
            Route(f"{_PATH}/items", self.add_items, methods=["POST"]),
            Route(f"{_PATH}/items/{{item_id}}", self.get_item),
            Route(f"{_PATH}/items/{{item_id}}", self.delete_item, methods=["DELETE"]),
        ]

    async def create(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, CreateConversationRequest)
        organisation = dependencies.organisation(request)
        items = await self._read(body.items or [], organisation, [], ignored)
        conversation = Conversation(
            id=new_conversation_id(),
            organisation=organisation,
            created_at=int(time.time()),
            metadata=_text(read_metadata(body.metadata)),
        )
        headers = dependencies.heed(self._config, ignored)
        await self._state.store.create_conversation(conversation, history.encoded(items))
        return dependencies.json(_shown(conversation), headers)

    async def get(self, request: Request) -> Response:
        organisation, id = _whose(request)
        return dependencies.json(_shown(await self._find(organisation, id)))

    async def update(self, request: Request) -> Response:
        organisation, id = _whose(request)
        body, ignored = await dependencies.read_body(request, UpdateConversationRequest)
        headers = dependencies.heed(self._config, ignored)
        if body.metadata is None:
            return dependencies.json(_shown(await self._find(organisation, id)), headers)
        metadata = _text(read_metadata(body.metadata))
        changed = await self._state.store.update_conversation(organisation, id, metadata=metadata)
        if changed is None:
            raise history.missing_conversation(id)
        return dependencies.json(_shown(changed), headers)

    async def delete(self, request: Request) -> Response:
        organisation, id = _whose(request)
        if not await self._state.store.delete_conversation(organisation, id):
            raise history.missing_conversation(id)
        return dependencies.json(DeletedConversation(id=id))

    async def list_items(self, request: Request) -> Response:
        organisation, id = _whose(request)
        query = dependencies.page_query(request.query_params)
        check_include(request.query_params)
        page = await self._state.store.conversation_items(
            organisation, id, after=query.after, before=query.before, limit=query.limit, order=query.order
        )
        if page is None:
            raise history.missing_conversation(id)
        return dependencies.json(listed(page))

    async def add_items(self, request: Request) -> Response:
        organisation, id = _whose(request)
        body, ignored = await dependencies.read_body(request, CreateItemsRequest)
        check_include(request.query_params)
        before = await self._state.store.conversation_history(organisation, id)
        if before is None:
            raise history.missing_conversation(id)
        items = history.encoded(await self._read(body.items, organisation, history.decoded(before), ignored))
        headers = dependencies.heed(self._config, ignored)
        if not await self._state.store.add_conversation_items(organisation, id, items):
            raise history.missing_conversation(id)
        return dependencies.json(listed(Page(tuple(items), has_more=False)), headers)

    async def get_item(self, request: Request) -> Response:
        organisation, id = _whose(request)
        check_include(request.query_params)
        name = request.path_params["item_id"]
        item = await self._state.store.get_conversation_item(organisation, id, name)
        if item is None:
            await self._find(organisation, id)
            raise _missing_item(id, name)
        return Response(item.json, media_type="application/json")

    async def delete_item(self, request: Request) -> Response:
        organisation, id = _whose(request)
        name = request.path_params["item_id"]
        conversation = await self._find(organisation, id)
        if not await self._state.store.delete_conversation_item(organisation, id, name):
            raise _missing_item(id, name)
        return dependencies.json(_shown(conversation))

    async def _find(self, organisation: str, id: str) -> Conversation:
        found = await self._state.store.get_conversation(organisation, id)
        if found is None:
            raise history.missing_conversation(id)
        return found

    async def _read(
        self, items: list[Any], organisation: str, before: list[dict[str, Any]], ignored: list[str]
    ) -> list[dict[str, Any]]:
        """The new items. What was said `before` tells which calls they may answer."""
        given = [item for item in items if isinstance(item, dict)]
        names = referenced(ResponseRequest(input=items))
        found = await history.named(self._state.store, organisation, names) if names else {}
        sealed = any(item.get("encrypted_content") for item in (*given, *before, *found.values()))
        seal = await self._state.seal(organisation) if sealed else NoSeal()
        context = Context(tenant=organisation, history=before, found=found, seal=seal)
        return await read_items(items, context, ignored)


def _whose(request: Request) -> tuple[str, str]:
    return dependencies.organisation(request), request.path_params["conversation_id"]


def _text(metadata: dict[str, str]) -> str:
    return msgspec.json.encode(metadata).decode()


def _shown(conversation: Conversation) -> ConversationObject:
    metadata = msgspec.json.decode(conversation.metadata, type=dict[str, str])
    return ConversationObject(id=conversation.id, created_at=conversation.created_at, metadata=metadata)


def _missing_item(id: str, item: str) -> NotFound:
    return NotFound(f"There is no item {item!r} in the conversation {id!r}.", code="item_not_found")
