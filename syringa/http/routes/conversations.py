"""The Conversations API: conversations and their items."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

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
from syringa.api.responses import ResponseContext, ResponseRequest, referenced_item_ids
from syringa.config import Config
from syringa.errors import NotFound
from syringa.http import dependencies
from syringa.http.routes.responses import check_include, item_list
from syringa.service.app_state import AppState
from syringa.service.responses import history
from syringa.service.responses.encryption import NullCipher
from syringa.store import ItemPage, StoredConversation


class ConversationRoutes:
    def __init__(self, config: Config, app_state: AppState) -> None:
        self._config, self._responses, self._history = config, app_state.responses, app_state.history

    async def create(self, request: Request) -> Response:
        body, ignored = await dependencies.read_body(request, CreateConversationRequest)
        organization = dependencies.organization(request)
        items = body.items or []
        async with self._history.read(organization, references=_references(items)) as found:
            stored = history.encode_items(await self._read(items, organization, found, ignored))
        self._history.limits.check(history.size_of(stored), "items")
        conversation = StoredConversation(
            id=new_conversation_id(),
            organization=organization,
            created_at=int(time.time()),
            metadata=_encode_metadata(read_metadata(body.metadata)),
        )
        headers = dependencies.ignored_fields_header(self._config, ignored)
        await self._responses.store.write(lambda session: session.conversations.create(conversation, stored))
        return dependencies.json(_to_object(conversation), headers)

    async def get(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        return dependencies.json(_to_object(await self._find(organization, id)))

    async def update(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        body, ignored = await dependencies.read_body(request, UpdateConversationRequest)
        headers = dependencies.ignored_fields_header(self._config, ignored)
        if body.metadata is None:
            return dependencies.json(_to_object(await self._find(organization, id)), headers)
        metadata = _encode_metadata(read_metadata(body.metadata))
        changed = await self._responses.store.write(
            lambda session: session.conversations.update(organization, id, metadata=metadata)
        )
        if changed is None:
            raise history.missing_conversation(id)
        return dependencies.json(_to_object(changed), headers)

    async def delete(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        if not await self._responses.store.write(lambda session: session.conversations.delete(organization, id)):
            raise history.missing_conversation(id)
        return dependencies.json(DeletedConversation(id=id))

    async def list_items(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        query = dependencies.read_page_query(request.query_params)
        check_include(request.query_params)
        page = await self._responses.store.read(
            lambda session: session.conversations.list_items(
                organization, id, after=query.after, before=query.before, limit=query.limit, order=query.order
            )
        )
        if page is None:
            raise history.missing_conversation(id)
        return dependencies.json(item_list(page))

    async def add_items(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        body, ignored = await dependencies.read_body(request, CreateItemsRequest)
        check_include(request.query_params)
        references = _references(body.items)
        await self._find(organization, id)
        async with self._history.read(organization, conversation=id, references=references) as found:
            items = history.encode_items(await self._read(body.items, organization, found, ignored))
        headers = dependencies.ignored_fields_header(self._config, ignored)
        size, limits = history.size_of(items), self._history.limits
        if not await self._responses.store.write(
            lambda session: session.conversations.add_items(
                organization, id, items, check_size=lambda before: limits.check(before + size, "items")
            )
        ):
            raise history.missing_conversation(id)
        return dependencies.json(item_list(ItemPage(tuple(items), has_more=False)), headers)

    async def get_item(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        check_include(request.query_params)
        item_id = request.path_params["item_id"]
        item = await self._responses.store.read(
            lambda session: session.conversations.get_item(organization, id, item_id)
        )
        if item is None:
            await self._find(organization, id)
            raise _item_not_found(id, item_id)
        return Response(item.json, media_type="application/json")

    async def delete_item(self, request: Request) -> Response:
        organization, id = _organization_and_id(request)
        item_id = request.path_params["item_id"]
        conversation = await self._find(organization, id)
        if not await self._responses.store.write(
            lambda session: session.conversations.delete_item(organization, id, item_id)
        ):
            raise _item_not_found(id, item_id)
        return dependencies.json(_to_object(conversation))

    async def _find(self, organization: str, id: str) -> StoredConversation:
        found = await self._responses.store.read(lambda session: session.conversations.get(organization, id))
        if found is None:
            raise history.missing_conversation(id)
        return found

    async def _read(
        self, items: list[Any], organization: str, found: history.History, ignored: list[str]
    ) -> list[dict[str, Any]]:
        """Read new items. The items before them contain the tool calls that they may answer."""
        new = [item for item in items if isinstance(item, dict)]
        encrypted = any(item.get("encrypted_content") for item in (*new, *found.items, *found.referenced.values()))
        cipher = await self._responses.cipher(organization) if encrypted else NullCipher()
        context = ResponseContext(
            tenant=organization, history=found.items, referenced_items=found.referenced, cipher=cipher
        )
        return await read_items(items, context, ignored)


def _references(items: list[Any]) -> list[str]:
    return referenced_item_ids(ResponseRequest(input=items))


def _organization_and_id(request: Request) -> tuple[str, str]:
    return dependencies.organization(request), request.path_params["conversation_id"]


def _encode_metadata(metadata: dict[str, str]) -> str:
    return msgspec.json.encode(metadata).decode()


def _to_object(conversation: StoredConversation) -> ConversationObject:
    metadata = msgspec.json.decode(conversation.metadata, type=dict[str, str])
    return ConversationObject(id=conversation.id, created_at=conversation.created_at, metadata=metadata)


def _item_not_found(id: str, item: str) -> NotFound:
    return NotFound(f"There is no item {item!r} in the conversation {id!r}.", code="item_not_found")
