"""Grammars from the values of request fields: schemas, regular expressions, choices, grammars and structural tags.

Every function raises `InvalidRequest` with the given path, or one below it, as `param`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from syringa.api.decoding import convert
from syringa.errors import InvalidRequest
from syringa.prompt.grammar.gbnf import gbnf_to_lark, is_gbnf
from syringa.prompt.grammar.lark import LarkVocabulary, string_literal
from syringa.prompt.grammar.schema import enforceable_schema
from syringa.prompt.grammar.structural_tag import FORMAT_NAMES, StructuralTag, structural_tag_grammar
from syringa.prompt.grammar.validation import MAX_CHARACTERS, check_grammar_text
from syringa.types import Grammar

MAX_TAG_CHARACTERS = 1_000_000  # of the JSON text of a structural tag
MAX_PATTERN = 200  # characters of a pattern for whitespace
CloseSchema = Callable[[dict[str, Any]], dict[str, Any]]

_ONE_WHITESPACE = r"(?:[ \t\r\n]|\\(?:[tnrs ]|x20|x0[9aAdD]))"
_WHITESPACE_PATTERN = re.compile(
    rf"(?:{_ONE_WHITESPACE}|\[{_ONE_WHITESPACE}++\]|\(\?:|[()|?*+]|\{{[0-9]{{1,4}}(?:,[0-9]{{0,4}})?\}})*+"
)


def schema_grammar(
    schema: Any,
    path: str,
    *,
    strict: bool = False,
    ignored: list[str],
    close: CloseSchema | None = None,
    whitespace: str = "",
) -> Grammar:
    """Return a JSON schema as a grammar.

    Keywords that cannot be enforced are refused under `strict`, otherwise their paths are appended to `ignored`.
    `close` excludes undeclared properties. `whitespace` is a regular expression for the whitespace between the parts of
    the JSON text; by default there is none.
    """
    try:
        kept, left_out, unknown = enforceable_schema(schema)
    except InvalidRequest as error:
        where = path + (error.param or "")
        raise InvalidRequest(f"{where}: {error.message}", param=where, code=error.code) from None
    if strict and left_out:
        names = ", ".join(path + each for each in left_out[:20])
        raise InvalidRequest(
            f"Cannot be enforced although strict is true: {names}. Remove it from the schema, or remove strict.",
            param=path + left_out[0],
        )
    ignored += [path + each for each in left_out + unknown]
    if isinstance(kept, dict) and close is not None:
        try:
            kept = close(kept)
        except RecursionError:  # in a definition that is not used
            raise InvalidRequest(f"{path}: nested too deeply.", param=path) from None
    if whitespace and kept is not False:
        options = {"whitespace_flexible": False, "whitespace_pattern": whitespace}
        kept = {**(kept if isinstance(kept, dict) else {}), "x-guidance": options}
    return Grammar("json_schema", _encode(kept, path))


def read_whitespace_pattern(pattern: str, path: str) -> str:
    """Return a regular expression that matches nothing but whitespace that JSON allows."""
    try:
        valid = len(pattern) <= MAX_PATTERN and _WHITESPACE_PATTERN.fullmatch(pattern) and re.compile(pattern)
    except re.error:
        valid = None
    if not valid:
        raise InvalidRequest(
            f"{path}: expected a regular expression for spaces, tabs and line breaks, such as [ \\n]?.", param=path
        )
    return pattern.replace(r"\s", r"[ \t\r\n]")


def read_json(value: Any, path: str) -> dict[str, Any] | bool:
    """Return a JSON object, or `true` or `false`, given as such or as text."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if isinstance(found, dict | bool):
            return found
    except (ValueError, RecursionError):
        pass
    raise InvalidRequest(f"{path}: expected a JSON object, or its text.", param=path)


def regex_grammar(pattern: Any, path: str) -> Grammar:
    return Grammar("regex", _text(pattern, path))


def choice_grammar(choices: list[str], path: str) -> Grammar:
    """Return a grammar for one of the texts."""
    literals = " | ".join(map(string_literal, dict.fromkeys(choices)))
    return _checked(Grammar("lark", f"start: CHOICE\nCHOICE: {literals}"), path)


def lark_grammar(text: Any, path: str) -> Grammar:
    return _checked(Grammar("lark", _text(text, path)), path)


def llguidance_grammar(value: Any, path: str) -> Grammar:
    return _checked(Grammar("llguidance", _encode(read_json(value, path), path)), path)


def lark_or_gbnf_grammar(text: Any, path: str) -> Grammar:
    """Return a grammar written in Lark or GBNF."""
    text = _text(text, path)
    if len(text) > MAX_CHARACTERS:
        raise InvalidRequest(f"{path}: at most {MAX_CHARACTERS} characters, got {len(text)}.", param=path)
    if is_gbnf(text):
        try:
            text = gbnf_to_lark(text)
        except InvalidRequest as error:
            raise InvalidRequest(f"{path}: {error.message}", param=path, code="invalid_grammar") from None
    return lark_grammar(text, path)


def tag_grammar(
    value: Any,
    path: str,
    vocabulary: LarkVocabulary,
    *,
    ignored: list[str],
    close: CloseSchema | None = None,
    whitespace: str = "",
) -> Grammar:
    """Return the grammar of a structural tag, given as an object or as its JSON text."""

    def read_schema(schema: Any, where: str) -> str:
        # `%json` takes an object, to which the options can be attached.
        if schema is False:
            raise InvalidRequest(f"{where}: nothing matches false.", param=where)
        schema = {} if schema is True else schema
        kept = json.loads(schema_grammar(schema, where, ignored=ignored, close=close, whitespace=whitespace).value)
        return json.dumps({"x-guidance": {"whitespace_flexible": False}, **kept})

    try:
        given = read_json(value, path)
        if (length := len(_encode(given, path))) > MAX_TAG_CHARACTERS:
            raise InvalidRequest(f"{path}: at most {MAX_TAG_CHARACTERS} characters, got {length}.", param=path)
        tag = convert(given, StructuralTag, path=path, ignored=ignored)
        return structural_tag_grammar(
            tag,
            path,
            vocabulary,
            read_schema=read_schema,
            read_grammar=lambda text, where: lark_or_gbnf_grammar(text, where).value,
        )
    except RecursionError:
        raise InvalidRequest(f"{path}: nested too deeply.", param=path) from None
    except InvalidRequest as error:
        if error.param is not None and error.param.endswith(".type") and "invalid value" in error.message:
            names = ", ".join(FORMAT_NAMES)
            raise InvalidRequest(f"{error.message} Supported formats: {names}.", param=error.param) from None
        raise


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{path}: expected a string.", param=path)
    return value


def _checked(grammar: Grammar, path: str) -> Grammar:
    """Return a grammar written by the client if it is within the limits."""
    check_grammar_text(grammar, path)
    return grammar


def _encode(value: Any, path: str) -> str:
    try:
        return json.dumps(value, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest(f"{path}: nested too deeply.", param=path) from None
