"""The records that go into the store and come out of it. JSON is text here: only the caller knows its type."""

from __future__ import annotations

import time
from typing import Literal

import msgspec

from syringa.ids import random_id

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Order = Literal["asc", "desc"]
ItemRole = Literal["input", "output"]
Outcome = Literal["ok", "cancelled", "refused", "failed"]
Grouping = Literal["day", "organization", "key", "model", "endpoint", "user"]
RevisionName = Literal["keys", "models", "batches"]
FilePurpose = Literal["batch", "batch_output"]
PullStatus = Literal["running", "completed", "failed", "cancelled"]
PullStage = Literal["resolving", "downloading", "adding"]
BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]

ACTIVE: tuple[ResponseStatus, ...] = ("queued", "in_progress")
ACTIVE_BATCH: tuple[BatchStatus, ...] = ("validating", "in_progress", "finalizing", "cancelling")


class StoredItem(msgspec.Struct, frozen=True):
    """An item of a response or a conversation. `json` is the whole item, including its id."""

    id: str
    json: str


class StoredEvent(msgspec.Struct, frozen=True):
    """One event of a response's stream."""

    sequence: int
    json: str


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response without its input. `body` is the response object without its output items."""

    id: str
    organization: str = ""  # "": the server has no keys
    created_at: int
    expires_at: int | None = None  # hidden from this second on
    model: str
    status: ResponseStatus
    background: bool = False
    previous_id: str | None = None
    conversation_id: str | None = None
    body: str
    process: str | None = None  # the identity of the process that runs it, while it is active
    output: tuple[StoredItem, ...] = ()


class StoredConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation without its items."""

    id: str
    organization: str = ""
    created_at: int
    expires_at: int | None = None
    metadata: str = "{}"  # JSON


class ResponseFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects responses of an organization. None selects all."""

    model: str | None = None
    statuses: tuple[ResponseStatus, ...] | None = None
    conversation_id: str | None = None
    previous_id: str | None = None
    background: bool | None = None


class ListedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response in a list. `input` and `output` are the JSON of its last items, unless they are missing or long."""

    id: str
    created_at: int
    expires_at: int | None
    model: str
    status: ResponseStatus
    background: bool
    previous_id: str | None
    conversation_id: str | None
    body: str
    input: str | None = None
    output: str | None = None


class ListedConversation(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation in a list, with the number of its items."""

    id: str
    created_at: int
    metadata: str
    items: int = 0


class ListSize(msgspec.Struct, frozen=True):
    """The size of a list of items. `bytes` are those of their JSON."""

    items: int = 0
    bytes: int = 0

    def __add__(self, other: ListSize) -> ListSize:
        return ListSize(self.items + other.items, self.bytes + other.bytes)


class ItemPage(msgspec.Struct, frozen=True):
    """A page of a list of items, in the requested order."""

    items: tuple[StoredItem, ...]
    has_more: bool


class ChainLink(msgspec.Struct, frozen=True):
    """One response of a chain."""

    id: str
    status: ResponseStatus
    model: str
    conversation_id: str | None


class Chain(msgspec.Struct, frozen=True):
    """A response with all its predecessors: the input, then the output of each, oldest first.

    A response that ran in a conversation contributes its own items, not those that the conversation had before it; the
    `conversation_id` of its link tells.
    """

    items: tuple[StoredItem, ...]
    links: tuple[ChainLink, ...]


class BrokenChain(msgspec.Struct, frozen=True):
    """A chain with a response that is unknown, deleted or expired: `missing`, the predecessor of `after`.

    `after` is None if the requested response itself is missing.
    """

    missing: str
    after: str | None


class ResponseKey(msgspec.Struct, frozen=True):
    """What identifies a response."""

    organization: str
    id: str


class Organization(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant: its API keys share responses and limits. None as a limit is the server's default; 0 is no limit."""

    id: str
    created_at: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of an API key; the key itself is not. None or 0 as a limit is no limit of its own."""

    id: str
    organization: str
    name: str = ""
    digest: str
    hint: str  # the first characters, by which a person recognizes it in a list
    admin: bool = False
    models: tuple[str, ...] | None = None  # ids of the models that it may use; None: all
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    created_at: int
    expires_at: int | None = None  # refused from this second on
    revoked_at: int | None = None
    last_used_at: int | None = None


class KeySnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """What a process needs to authenticate requests, as of one revision."""

    revision: int
    keys: tuple[ApiKey, ...]  # valid keys, and keys that expired recently
    organizations: dict[str, Organization]
    any_ever_created: bool  # whether there ever was a key, even if it was revoked


def _record_id() -> str:
    """Return an id that begins with the time, so that new rows are adjacent in the index."""
    return f"{time.time_ns() // 1_000_000:012x}{random_id(count=8)}"


class UsageRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The usage of one request, or of several that were refused for the same reason."""

    id: str = msgspec.field(default_factory=_record_id)  # a record that is written twice counts once
    at: float  # when the request began
    organization: str = ""
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
    load_seconds: float = 0.0  # waiting for the model to be loaded
    first_token_seconds: float | None = None
    total_seconds: float = 0.0
    cost: float = 0.0  # in the currency of the prices


class UsageFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Selects records of requests that began at `since` or later and before `until`. None selects all."""

    since: float | None = None
    until: float | None = None
    organization: str | None = None
    key: str | None = None
    model: str | None = None


class UsageSum(msgspec.Struct, frozen=True, kw_only=True):
    """A sum of usage records. Fields by which they are not grouped are None."""

    day: str | None = None  # 2026-01-31, UTC
    organization: str | None = None
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
    """Statistics of a model. Its decoding speed is `decode_tokens` / `decode_seconds`.

    These count the tokens after the first, of answers with at least two, so that neither queueing nor prefill counts.
    """

    model: str
    ok: int
    failed: int
    decode_tokens: int
    decode_seconds: float
    first_token_seconds: float | None  # the mean of successful requests; None: there were none
    last_at: float


class StoredPull(msgspec.Struct, frozen=True, kw_only=True):
    """A download of a model, of the server that began it."""

    id: str
    model: str
    serve_as: str  # the id that it gets
    status: PullStatus = "running"
    stage: PullStage | None = None  # of a running one
    files: str = "[]"  # JSON
    total_bytes: int | None = None
    bytes_per_second: float | None = None
    error: str | None = None
    process: str  # the identity of the process that runs it
    cancel: bool = False  # it is to be canceled
    created_at: int
    updated_at: float
    ended_at: int | None = None


class SeriesRow(msgspec.Struct, frozen=True):
    """The figures of a model in an interval, as one process has counted them."""

    resolution: int  # the length of the interval, in seconds
    start: int
    model: str  # empty: of requests that were refused before their model was known
    source: str  # the process; empty: several
    figures: str  # JSON


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model configured at run time."""

    id: str
    definition: str  # JSON
    updated_at: int


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that was uploaded, or written by a batch. Its bytes are on disk."""

    id: str
    organization: str = ""
    created_at: int
    expires_at: int | None = None  # hidden from this second on
    filename: str
    purpose: FilePurpose
    bytes: int


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of requests. Its lines are in its input file, their results are stored until it is finished."""

    id: str
    organization: str = ""
    created_at: int
    expires_at: int | None = None  # hidden from this second on; set when it is finished
    deadline: int  # the end of the completion window
    status: BatchStatus = "validating"
    key: str = ""  # the id of the API key that created it
    endpoint: str
    completion_window: str
    input_file: str
    output_file: str | None = None
    error_file: str | None = None
    output_seconds: int | None = None  # for which the output files are kept; None: the server's default
    model: str | None = None  # that of all lines; None: they differ, or it is not known yet
    metadata: str | None = None  # JSON
    errors: str | None = None  # a JSON list: why it failed
    times: str = "{}"  # a JSON object: when it had each status
    total: int = 0  # lines
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0  # of the input
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output


class ActiveBatch(msgspec.Struct, frozen=True):
    """A batch that is not finished, and the owner of its lease, if it has one."""

    batch: StoredBatch
    owner: str | None


class FinishedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What a response of the Responses API adds to the store at its end.

    It is the response with its input `items`, or, of a response that is not stored itself, the `items` that it adds to
    a conversation.
    """

    response: StoredResponse | None = None
    conversation_id: str | None = None
    items: tuple[StoredItem, ...] = ()

    @property
    def size(self) -> int:
        """Characters, about."""
        response = self.response
        items = self.items if response is None else (*self.items, *response.output)
        return sum(len(item.json) for item in items) + (0 if response is None else len(response.body))


class BatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one line of a batch. `body` is its line of the output or error file."""

    line: int  # in the input file, from 1
    failed: bool
    body: str
    usage: UsageRecord | None = None  # None: nothing was run
    response: FinishedResponse | None = None  # of a line for the Responses API

    @property
    def size(self) -> int:
        """Characters, about."""
        return len(self.body) + (0 if self.response is None else self.response.size)


class BatchCounts(msgspec.Struct, frozen=True, kw_only=True):
    """All unfinished batches with a status: their number and the number of their lines that are not done."""

    status: BatchStatus
    batches: int
    waiting_lines: int
