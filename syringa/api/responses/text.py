"""`text`: the format that the answer is held to."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.constraints import ANY_OBJECT, check_grammar, schema_grammar
from syringa.api.responses.schemas import NAME
from syringa.errors import InvalidRequest
from syringa.prompt.grammar.compile_pool import in_workshop
from syringa.types import Grammar

_PATH = "text.format"


class TextOptions(msgspec.Struct, kw_only=True):
    format: Any = None
    verbosity: Literal["low", "medium", "high"] = "medium"


class FormatField(msgspec.Struct, kw_only=True):
    type: str


class SchemaField(msgspec.Struct, kw_only=True):
    type: str
    name: Annotated[str, Meta(pattern=NAME)]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool = False


class TextRequest(msgspec.Struct, frozen=True):
    """The constraint, and what the response repeats of it."""

    grammar: Grammar | None
    echo: dict[str, Any]


async def read_text(given: dict[str, Any] | None, ignored: list[str], *, open_mode: bool) -> TextRequest:
    """What is not honoured of it is added to `ignored`."""
    options = convert(given or {}, TextOptions, path="text", ignored=ignored)
    if options.verbosity != "medium":
        ignored.append("text.verbosity")
    form = {"type": "text"} if options.format is None else options.format
    kind = convert(form, FormatField, path=_PATH).type
    grammar = None
    match kind:
        case "text" | "json_object":
            convert(form, FormatField, path=_PATH, ignored=ignored)
            echo = {"type": kind}
            grammar = Grammar("json_schema", ANY_OBJECT) if kind == "json_object" else None
        case "json_schema":
            field = convert(form, SchemaField, path=_PATH, ignored=ignored)
            echo = _echo(field, open_mode)
            # Compiling a hostile schema can take a while; other requests must not wait for it.
            grammar = await in_workshop(lambda: _checked(field, ignored), f"{_PATH}.schema")
        case _:
            raise InvalidRequest(
                f"{_PATH}.type: expected text, json_object or json_schema, not {kind!r}.", param=f"{_PATH}.type"
            )
    return TextRequest(grammar, {"format": echo, "verbosity": options.verbosity})


def _checked(field: SchemaField, ignored: list[str]) -> Grammar:
    grammar = schema_grammar(field.schema, f"{_PATH}.schema", strict=field.strict, ignored=ignored, close=True)
    check_grammar(grammar, f"{_PATH}.schema")
    return grammar


def _echo(field: SchemaField, open_mode: bool) -> dict[str, Any]:
    """Open Responses' schema of a response knows no schema but null there, and always a description."""
    echo: dict[str, Any] = {"type": "json_schema", "name": field.name, "strict": field.strict}
    if open_mode:
        return {**echo, "description": field.description, "schema": None}
    about = {} if field.description is None else {"description": field.description}
    return {**echo, **about, "schema": field.schema}
