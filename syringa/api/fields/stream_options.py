"""`stream_options`, which every streaming endpoint of OpenAI's shape takes."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.annotations import REFUSED, record, says
from syringa.errors import InvalidRequest

_SCHEMA = record(
    include_usage={"type": ["boolean", "null"], "description": "A last chunk without choices carries the usage."},
    include_obfuscation={"enum": [False, None], "description": "Refused where true.", REFUSED: True},
)
StreamOptionsField = Annotated[
    Annotated[dict[str, Any], Meta(extra_json_schema=_SCHEMA)] | None,
    says("Only with `stream`: `include_usage`; `include_obfuscation` is refused."),
]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


def read_stream_options(given: dict[str, Any] | None, *, stream: bool, ignored: list[str]) -> StreamOptions:
    """The options, which are for streams alone."""
    if given is not None and not stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    options = convert(given or {}, StreamOptions, path="stream_options", ignored=ignored)
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise InvalidRequest(f"{param} is not supported.", param=param)
    return options
