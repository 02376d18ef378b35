"""What goes into the store and comes out of it. JSON stays text here: whoever wrote it knows its type."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Order = Literal["asc", "desc"]
Role = Literal["input", "output"]

ACTIVE: tuple[Status, ...] = ("queued", "in_progress")


class Item(msgspec.Struct, frozen=True):
    """An item of a response or of a conversation; `json` is the whole of it, its id included."""

    id: str
    json: str


class Event(msgspec.Struct, frozen=True):
    """One event of a response's stream."""

    sequence: int
    json: str


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response without its input. `body` is the response object without its output items."""

    id: str
    organisation: str = ""  # "": the local user
    created_at: int
    expires_at: int | None = None  # from this second on it is not there any more
    model: str
    status: Status
    background: bool = False
    previous_id: str | None = None
    conversation_id: str | None = None
    body: str
    owner: str | None = None  # the process that runs it, for as long as it runs
    output: tuple[Item, ...] = ()


class Conversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its items."""

    id: str
    organisation: str = ""
    created_at: int
    expires_at: int | None = None
    metadata: str = "{}"  # JSON


class Page(msgspec.Struct, frozen=True):
    """A part of a list, in the order that was asked for; `has_more` says whether the walk can go on."""

    items: tuple[Item, ...]
    has_more: bool


class ChainLink(msgspec.Struct, frozen=True):
    """One response of a chain."""

    id: str
    status: Status
    model: str
    conversation_id: str | None


class Chain(msgspec.Struct, frozen=True):
    """A response with all that came before it: every response's input, then its output, oldest first.

    A response that ran inside a conversation contributes its own items, not those the conversation held before it;
    its link's `conversation_id` tells.
    """

    items: tuple[Item, ...]
    links: tuple[ChainLink, ...]


class BrokenChain(msgspec.Struct, frozen=True):
    """`missing` never was, or was deleted, or has expired. `after` continued it; None: it was asked for itself."""

    missing: str
    after: str | None


class Running(msgspec.Struct, frozen=True):
    """A response that a process runs, or ran when it was last heard of."""

    organisation: str
    id: str
