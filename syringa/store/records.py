"""What goes into the store and comes out of it. JSON stays text here: whoever wrote it knows its type."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from syringa.ids import fresh_id

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Order = Literal["asc", "desc"]
Role = Literal["input", "output"]
Outcome = Literal["ok", "cancelled", "refused", "failed"]
Grouping = Literal["day", "organisation", "key", "model", "endpoint", "user"]
Revised = Literal["keys", "models"]

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


class Organisation(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever shares responses and limits. A limit that is None is the server's default; 0: no limit."""

    id: str
    created_at: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a key, which is not the key. A limit that is None or 0 is none of its own."""

    id: str
    organisation: str
    name: str = ""
    digest: str
    hint: str  # how it begins, for a person who looks for it in a list
    admin: bool = False
    models: tuple[str, ...] | None = None  # ids of the models that it may use; None: all
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    created_at: int
    expires_at: int | None = None  # from this second on it is not accepted any more
    revoked_at: int | None = None
    last_used_at: int | None = None


class KeySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All that is needed to tell callers apart, at one moment."""

    revision: int
    keys: tuple[ApiKey, ...]  # those that may be used, and those that lately could
    organisations: dict[str, Organisation]
    any_ever: bool  # whether there ever was a key, be it revoked


def _row_id() -> str:
    """Begins with the time, so that new rows come to lie beside each other in the index."""
    return f"{time.time_ns() // 1_000_000:012x}{fresh_id(count=8)}"


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one request cost; or several, where they were refused for the same reason."""

    id: str = msgspec.field(default_factory=_row_id)  # so that a row which is written twice counts once
    at: float  # when it began
    organisation: str = ""
    key: str = ""
    model: str
    endpoint: str
    user: str | None = None
    request_id: str = ""
    outcome: Outcome
    status: int
    requests: int = 1
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output
    queue_seconds: float = 0.0
    load_seconds: float = 0.0  # waiting for a cold model
    first_token_seconds: float | None = None
    total_seconds: float = 0.0
    cost: float = 0.0  # in the currency of the prices


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which rows count: those that began at `since` or later and before `until`. None: it does not matter."""

    since: float | None = None
    until: float | None = None
    organisation: str | None = None
    key: str | None = None
    model: str | None = None


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    """Rows added up. What they were not grouped by is None, and so is the user of requests that named none."""

    day: str | None = None  # 2026-01-31, UTC
    organisation: str | None = None
    key: str | None = None
    model: str | None = None
    endpoint: str | None = None
    user: str | None = None
    requests: int = 0
    ok: int = 0
    cancelled: int = 0
    refused: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cost: float = 0.0


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """How a model did. Its speed is `later_tokens` in `later_seconds`: after each answer's first token, so that neither
    the queue nor the prompt count, over the answers that have at least two tokens."""

    model: str
    ok: int
    failed: int
    later_tokens: int
    later_seconds: float
    first_token_seconds: float | None  # the mean of what went well; None: nothing did
    last_at: float


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A model that was configured at run time."""

    id: str
    definition: str  # JSON
    updated_at: int
