"""The `text` field: the format of the output."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.constraints import ANY_OBJECT
from syringa.api.fields.grammars import schema_grammar
from syringa.api.responses.schemas import NAME
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import close_schema
from syringa.types import Grammar

_PATH = "text.format"


class TextOptions(msgspec.Struct, kw_only=True):
    format: Any = None
    verbosity: Literal["low", "medium", "high"] = "medium"


class TextFormatField(msgspec.Struct, kw_only=True):
    type: str


class JsonSchemaFormatField(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, Meta(pattern=NAME)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool = False


class TextFormat(msgspec.Struct, frozen=True):
    """The constraint on the text, and the field as the response repeats it."""

    grammar: Grammar | None
    echo: dict[str, Any]


async def read_text(given: dict[str, Any] | None, ignored: list[str], *, open_mode: bool) -> TextFormat:
    """Validate `text`. The paths of parts that are not honored are appended to `ignored`."""
    options = convert(given or {}, TextOptions, path="text", ignored=ignored)
    if options.verbosity != "medium":
        ignored.append("text.verbosity")
    format = {"type": "text"} if options.format is None else options.format
    kind = convert(format, TextFormatField, path=_PATH).type
    grammar = None
    match kind:
        case "text" | "json_object":
            convert(format, TextFormatField, path=_PATH, ignored=ignored)
            echo = {"type": kind}
            grammar = Grammar("json_schema", json.dumps(ANY_OBJECT)) if kind == "json_object" else None
        case "json_schema":
            field = convert(format, JsonSchemaFormatField, path=_PATH, ignored=ignored)
            echo = _echo(field, open_mode)
            grammar = await asyncio.to_thread(_schema_grammar, field, ignored)
        case _:
            raise InvalidRequest(
                f"{_PATH}.type: expected text, json_object or json_schema, not {kind!r}.", param=f"{_PATH}.type"
            )
    return TextFormat(grammar, {"format": echo, "verbosity": options.verbosity})


def _schema_grammar(field: JsonSchemaFormatField, ignored: list[str]) -> Grammar:
    return schema_grammar(field.schema, f"{_PATH}.schema", strict=field.strict, ignored=ignored, close=close_schema)


def _echo(field: JsonSchemaFormatField, open_mode: bool) -> dict[str, Any]:
    """Return the format as the response repeats it. Open Responses requires a null schema and a description."""
    echo: dict[str, Any] = {"type": "json_schema", "name": field.name, "strict": field.strict}
    if open_mode:
        return {**echo, "description": field.description, "schema": None}
    description = {} if field.description is None else {"description": field.description}
    return {**echo, **description, "schema": field.schema}
