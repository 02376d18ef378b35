"""`/v1/conversations`: a list of items with an id, which responses go on from and add to."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.fields.annotations import says
from syringa.api.fields.metadata import MetadataField, check_metadata
from syringa.api.responses.context import Context, Item
from syringa.api.responses.input import read_input
from syringa.api.responses.items import new_id
from syringa.api.responses.schemas import INPUT_SCHEMA
from syringa.errors import InvalidRequest, RequestError

MAX_ITEMS = 20
_ITEM: dict[str, Any] = next(each for each in INPUT_SCHEMA["anyOf"] if each.get("type") == "array")["items"]
_Items = Annotated[
    list[Annotated[Any, Meta(extra_json_schema=_ITEM)]],
    Meta(max_length=MAX_ITEMS),
]


class CreateConversationRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/conversations`."""

    items: Annotated[_Items | None, says(f"What it begins with, {MAX_ITEMS} items at most.")] = None
    metadata: Annotated[MetadataField, says("Up to 16 pairs, kept and sent back.")] = None


class UpdateConversationRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/conversations/{conversation_id}`."""

    metadata: Annotated[MetadataField, says("Up to 16 pairs, in place of those that it has; absent: they stay.")] = None


class CreateItemsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/conversations/{conversation_id}/items`."""

    items: Annotated[_Items, says(f"What to add at the end, {MAX_ITEMS} items at most.")]


class ConversationObject(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[str, says("`conversation`.", const="conversation")] = "conversation"
    created_at: Annotated[int, says("Unix time, in seconds.")]
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[str, says("`conversation.deleted`.", const="conversation.deleted")] = "conversation.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    object: Annotated[str, says("`list`.", const="list")] = "list"
    data: list[dict[str, Any]]
    first_id: Annotated[str, says("Empty where the list is.")]
    last_id: Annotated[str, says("Empty where the list is.")]
    has_more: bool


def new_conversation_id() -> str:
    return new_id("conv")


def read_metadata(given: dict[str, Any] | None) -> dict[str, str]:
    metadata = given or {}
    check_metadata(metadata)
    return metadata


async def read_items(given: list[Any], context: Context, ignored: list[str]) -> list[Item]:
    """New items as they are kept, with ids. `context.history` has those that they may answer."""
    if not given:
        return []
    named: list[str] = []
    try:
        read = await read_input(given, context, sees_images=True, ignored=named)
    except RequestError as error:
        raise _renamed(error) from None
    ignored += [_path(name) for name in named]
    return read.items


def _path(name: str) -> str:
    return "items" + name.removeprefix("input") if name.startswith("input") else name


def _renamed(error: RequestError) -> RequestError:
    """Here the same field is called `items`."""
    if error.param is None or not error.param.startswith("input"):
        return error
    message = _path(error.message)
    kind = type(error) if isinstance(error, InvalidRequest) else InvalidRequest
    return kind(message, param=_path(error.param), code=error.code)
