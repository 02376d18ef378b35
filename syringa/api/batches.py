"""`/v1/batches`: wire types of batches, in OpenAI's shapes."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.fields.common import CachedTokens, MetadataField, ReasoningTokens
from syringa.api.fields.schema import doc
from syringa.api.files import ExpiryField
from syringa.errors import InvalidRequest

BatchEndpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
LINE_ENDPOINT = "/v1/batches"
"""The endpoint of a line in usage records and metrics."""

MAX_WINDOW_SECONDS = 14 * 86400
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNITS = {"m": 60, "h": 3600, "d": 86400}


class CreateBatchRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, doc("The id of an uploaded file with the purpose `batch`.")]
    endpoint: Annotated[BatchEndpoint, doc("The endpoint of all requests of the file.")]
    completion_window: Annotated[
        Annotated[str, Meta(pattern=f"^{_WINDOW.pattern}$")],
        doc("The time within which the requests are run, such as `24h`: minutes, hours or days, at most 14 days."),
    ]
    metadata: Annotated[MetadataField, doc("Up to 16 key-value pairs, stored and returned.")] = None
    output_expires_after: Annotated[ExpiryField, doc("When the output and error files are deleted.")] = None


class BatchError(msgspec.Struct, kw_only=True):
    """Why a batch failed or was stopped."""

    code: str
    message: str
    param: str | None
    line: Annotated[int | None, doc("The line of the input file, from 1.")]


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchUsage(msgspec.Struct, kw_only=True):
    """The tokens of all lines so far."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are Unix times in seconds, null for a status that it has not had."""

    id: str
    object: Annotated[str, doc("`batch`.", const="batch")] = "batch"
    endpoint: str
    model: Annotated[str | None, doc("The model of all requests; null if they differ.")]
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Annotated[
        str,
        doc("`validating`, `failed`, `in_progress`, `finalizing`, `completed`, `expired`, `cancelling`, `cancelled`."),
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None = None
    expires_at: Annotated[int, doc("The end of the completion window.")]
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    """A page of batches."""

    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[BatchObject]
    first_id: Annotated[str | None, doc("Null if the list is empty.")]
    last_id: Annotated[str | None, doc("Null if the list is empty.")]
    has_more: bool


def read_window(window: str) -> int:
    """Return the seconds of a `completion_window`. Raises `InvalidRequest`."""
    found = _WINDOW.fullmatch(window)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_SECONDS:
        raise InvalidRequest(
            f"completion_window: expected a time such as 24h, at most {MAX_WINDOW_SECONDS // 86400} days, not"
            f" {window[:40]!r}.",
            param="completion_window",
        )
    return seconds


def read_errors(encoded: str | None) -> BatchErrors | None:
    """Return the errors of a batch, given as the JSON that is stored."""
    return None if encoded is None else BatchErrors(data=msgspec.json.decode(encoded, type=list[BatchError]))


def read_times(encoded: str) -> dict[str, Any]:
    """Return the times of a batch, given as the JSON that is stored."""
    found: dict[str, Any] = msgspec.json.decode(encoded)
    return found
