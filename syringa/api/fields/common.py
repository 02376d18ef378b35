"""Wire types that several endpoints share: errors, usage, `stream_options` and `metadata`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from syringa.api.decoding import convert
from syringa.api.fields.schema import REFUSED, doc, object_schema
from syringa.errors import InvalidRequest
from syringa.events import Usage

MAX_PAIRS, MAX_KEY, MAX_VALUE = 16, 64, 512
_METADATA_SCHEMA = {
    "propertyNames": {"maxLength": MAX_KEY},
    "maxProperties": MAX_PAIRS,
    "additionalProperties": {"type": "string", "maxLength": MAX_VALUE},
}
MetadataField = Annotated[dict[str, Any], Meta(extra_json_schema=_METADATA_SCHEMA)] | None

_STREAM_OPTIONS_SCHEMA = object_schema(
    include_usage={"type": ["boolean", "null"], "description": "Send a last chunk with empty `choices` and the usage."},
    continuous_usage_stats={
        "type": ["boolean", "null"],
        "description": "With `include_usage`: every chunk has the token counts so far.",
    },
    include_obfuscation={"enum": [False, None], "description": "Refused if true.", REFUSED: True},
)
StreamOptionsField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=_STREAM_OPTIONS_SCHEMA)] | None,
    doc("Options of the stream; requires `stream: true`."),
]

CacheSaltField = Annotated[
    Annotated[str, Meta(min_length=1, max_length=256)] | None,
    doc(
        "Reuse cached prefixes, images and grammars only of requests with the same salt, 1 to 256 characters. Not "
        "carried over to the next response. Default: those of the organization without a salt."
    ),
]

FingerprintField = Annotated[
    str, doc("Changes with the files of the model, its data type, or the version of the server.")
]


def check_choices(prompts: int, candidates: int, limit: int, param: str) -> None:
    """Raise `InvalidRequest` if a request generates more choices than the server allows. `param` names the factor."""
    if prompts * candidates > limit:
        of_each = f" of each of {prompts} prompts" if prompts > 1 else ""
        raise InvalidRequest(
            f"{param}: {candidates} choices{of_each} are {prompts * candidates}; this server allows {limit} per request"
            " (max_choices).",
            param=param,
        )


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: Annotated[str | None, doc("JSON path of the invalid field.")]
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """The error body of every endpoint."""

    error: ErrorBody


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class ReasoningTokens(msgspec.Struct):
    reasoning_tokens: int


class UsageBody(msgspec.Struct):
    """Token counts. The counts so far that `continuous_usage_stats` adds to chunks have no details."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens | UnsetType = UNSET
    completion_tokens_details: ReasoningTokens | UnsetType = UNSET


def usage_body(usage: Usage) -> UsageBody:
    return UsageBody(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=CachedTokens(usage.cached_tokens),
        completion_tokens_details=ReasoningTokens(usage.reasoning_tokens),
    )


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


def read_stream_options(
    given: dict[str, Any] | None, *, stream: bool, ignored: list[str], always_include_usage: bool = False
) -> StreamOptions:
    """Validate `stream_options`. Raises `InvalidRequest` if the response is not streamed.

    With `always_include_usage`, every stream includes its usage.
    """
    if given is not None and not stream:
        raise InvalidRequest("stream_options requires stream: true.", param="stream_options")
    options = convert(given or {}, StreamOptions, path="stream_options", ignored=ignored)
    if always_include_usage:
        options.include_usage = True
    if options.continuous_usage_stats and not options.include_usage:
        options.continuous_usage_stats = False
        ignored.append("stream_options.continuous_usage_stats")
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise InvalidRequest(f"{param} is not supported.", param=param)
    return options


def check_metadata(given: dict[str, Any]) -> None:
    """Raise `InvalidRequest` for metadata that exceeds the limits."""
    if len(given) > MAX_PAIRS:
        raise InvalidRequest(f"metadata: at most {MAX_PAIRS} pairs, got {len(given)}.", param="metadata")
    for key, value in given.items():
        param = f"metadata.{key}"
        if len(key) > MAX_KEY or not isinstance(value, str) or len(value) > MAX_VALUE:
            raise InvalidRequest(
                f"{param}: expected a key of at most {MAX_KEY} characters and a string of at most {MAX_VALUE}.",
                param=param,
            )
