"""Wire types of the lists of stored responses and conversations."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from syringa.api.conversations import ConversationObject
from syringa.api.fields.schema import doc

STATUSES = ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled")
PREVIEW_LENGTH = 200  # characters


class ConversationReference(msgspec.Struct, kw_only=True):
    id: str


class ResponseSummary(msgspec.Struct, kw_only=True):
    """A stored response without its input and output."""

    id: str
    object: Annotated[str, doc("`response.summary`.", const="response.summary")] = "response.summary"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    expires_at: Annotated[int | None, doc("Unix time in seconds; null: never.")]
    model: str
    status: Annotated[str, doc("Status of the response.", enum=list(STATUSES))]
    background: bool
    previous_response_id: str | None
    conversation: ConversationReference | None
    usage: Annotated[dict[str, Any] | None, doc("As in the response.")] = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    input_preview: Annotated[
        str | None, doc(f"The first {PREVIEW_LENGTH} characters of the last input item that is text.")
    ]
    output_preview: Annotated[
        str | None, doc(f"The first {PREVIEW_LENGTH} characters of the last output item, if it is a message or a call.")
    ]


class ResponseList(msgspec.Struct, kw_only=True):
    """A page of responses."""

    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[ResponseSummary]
    first_id: Annotated[str, doc("Empty if the list is empty.")]
    last_id: Annotated[str, doc("Empty if the list is empty.")]
    has_more: bool


class ListedConversationObject(ConversationObject, kw_only=True):
    """A conversation in a list."""

    items: Annotated[int, doc("Number of its items.")]


class ConversationList(msgspec.Struct, kw_only=True):
    """A page of conversations."""

    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[ListedConversationObject]
    first_id: Annotated[str, doc("Empty if the list is empty.")]
    last_id: Annotated[str, doc("Empty if the list is empty.")]
    has_more: bool


class StoredFields(msgspec.Struct, kw_only=True):
    """The fields of a stored response's body that a summary repeats."""

    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None


class _Part(msgspec.Struct, kw_only=True):
    text: str | None = None
    refusal: str | None = None


class _Item(msgspec.Struct, kw_only=True):
    content: str | list[_Part] | None = None
    name: str | None = None
    arguments: str | None = None
    output: Any = None


_fields = msgspec.json.Decoder(StoredFields)
_item = msgspec.json.Decoder(_Item)


def read_stored_fields(body: str) -> StoredFields:
    """Return the fields of a stored body; none if it is malformed."""
    try:
        return _fields.decode(body)
    except msgspec.DecodeError:
        return StoredFields()


def preview(item: str | None) -> str | None:
    """Return the beginning of an item's text, in one line; None if it has none."""
    if item is None:
        return None
    try:
        found = _item.decode(item)
    except msgspec.DecodeError:
        return None
    if isinstance(found.content, str):
        text = found.content
    elif found.content:
        text = " ".join(each.text or each.refusal or "" for each in found.content)
    elif found.name is not None:
        text = f"{found.name}({found.arguments or ''})"
    elif isinstance(found.output, str):
        text = found.output
    else:
        return None
    line = " ".join(text[: 4 * PREVIEW_LENGTH].split())
    return line[:PREVIEW_LENGTH] or None
