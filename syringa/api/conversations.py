"""`/v1/conversations`: stored lists of items that responses continue from and append to."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.fields.common import MetadataField, check_metadata
from syringa.api.fields.schema import doc
from syringa.api.responses.context import Item, ResponseContext
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

    items: Annotated[_Items | None, doc(f"Initial items of the conversation, at most {MAX_ITEMS}.")] = None
    metadata: Annotated[MetadataField, doc("Up to 16 key-value pairs, stored and returned.")] = None


class UpdateConversationRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/conversations/{conversation_id}`."""

    metadata: Annotated[
        MetadataField, doc("Up to 16 key-value pairs that replace the current ones. Default: unchanged.")
    ] = None


class CreateItemsRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/conversations/{conversation_id}/items`."""

    items: Annotated[_Items, doc(f"Items to append, at most {MAX_ITEMS}.")]


class ConversationObject(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[str, doc("`conversation`.", const="conversation")] = "conversation"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    metadata: dict[str, str]


class DeletedConversation(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[str, doc("`conversation.deleted`.", const="conversation.deleted")] = "conversation.deleted"
    deleted: bool = True


class ItemList(msgspec.Struct, kw_only=True):
    """A page of items."""

    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[dict[str, Any]]
    first_id: Annotated[str, doc("Empty if the list is empty.")]
    last_id: Annotated[str, doc("Empty if the list is empty.")]
    has_more: bool


def new_conversation_id() -> str:
    return new_id("conv")


def read_metadata(given: dict[str, Any] | None) -> dict[str, str]:
    metadata = given or {}
    check_metadata(metadata)
    return metadata


async def read_items(given: list[Any], context: ResponseContext, ignored: list[str]) -> list[Item]:
    """Validate new items and return them as they are stored. They may answer calls in `context.history`."""
    if not given:
        return []
    input_ignored: list[str] = []
    try:
        read = await read_input(given, context, supports_images=True, ignored=input_ignored)
    except RequestError as error:
        raise _with_items_path(error) from None
    ignored += [_items_path(name) for name in input_ignored]
    return read.items


def _items_path(name: str) -> str:
    return "items" + name.removeprefix("input") if name.startswith("input") else name


def _with_items_path(error: RequestError) -> RequestError:
    """Return the error with `items` instead of `input` as the name of the field."""
    if error.param is None or not error.param.startswith("input"):
        return error
    message = _items_path(error.message)
    kind = type(error) if isinstance(error, InvalidRequest) else InvalidRequest
    return kind(message, param=_items_path(error.param), code=error.code)
