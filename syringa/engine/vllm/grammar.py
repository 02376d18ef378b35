"""Grammars for vLLM's llguidance backend, which takes a JSON schema, a regular expression or Lark."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from syringa.errors import InvalidRequest
from syringa.grammar.lark import resolve_special_tokens, tokenize
from syringa.types import Grammar

# With flexible whitespace, a small model may write blanks without end.
_JSON_OPTIONS = {"whitespace_flexible": False}


def to_structured_outputs(grammar: Grammar, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the arguments of vLLM's `StructuredOutputsParams`. Raises `InvalidRequest`.

    Special tokens are referred to by their ids in `special_tokens`: vLLM refuses their names.
    """
    resolved = resolve_special_tokens(grammar, special_tokens)
    match resolved.kind:
        case "regex":
            return {"regex": resolved.value}
        case "json_schema":
            return {"json": _with_options(msgspec.json.decode(resolved.value))}
        case "lark":
            return {"grammar": resolved.value}
    return {"grammar": _join(resolved.value)}


def _with_options(schema: Any) -> Any:
    return {"x-guidance": _JSON_OPTIONS, **(schema if isinstance(schema, dict) else {})}


def _join(text: str) -> str:
    """Return the grammars of an llguidance grammar as one in Lark, in which references are replaced by what they name.

    Raises `InvalidRequest` for parts that Lark cannot express.
    """
    grammars = msgspec.json.decode(text, type=dict[str, Any]).get("grammars", [])
    named = {each["name"]: each for each in grammars if each.get("name")}
    return _inline(grammars[0], named, ()) if grammars else ""


def _inline(grammar: dict[str, Any], named: Mapping[str, dict[str, Any]], path: tuple[str, ...]) -> str:
    """Return a grammar in Lark. `path` has the names of the grammars that it is a part of."""
    if grammar.get("json_schema") is not None:
        return f"start: {_embedded(grammar, named, path)}"
    parts: list[str] = []
    for token in tokenize(_lark_of(grammar)):
        if parts and parts[-1] == "@" and token.kind == "name":
            parts[-1] = _embedded(_named(token.text, named, path), named, (*path, token.text))
        else:
            parts.append(token.text)
    return "".join(parts)


def _embedded(grammar: dict[str, Any], named: Mapping[str, dict[str, Any]], path: tuple[str, ...]) -> str:
    """Return a grammar as an expression of another one."""
    if (schema := grammar.get("json_schema")) is not None:
        return f"%json {msgspec.json.encode(_with_options(schema)).decode()}"
    return f"%lark {{\n{_inline(grammar, named, path)}\n}}"


def _named(name: str, named: Mapping[str, dict[str, Any]], path: tuple[str, ...]) -> dict[str, Any]:
    if name not in named:
        raise _unsupported(f"there is no grammar {name!r}")
    if name in path:
        raise _unsupported(f"{name!r} refers to itself, which vLLM does not support")
    return named[name]


def _lark_of(grammar: dict[str, Any]) -> str:
    text = grammar.get("lark_grammar")
    if not isinstance(text, str):
        raise _unsupported("the model runs on vLLM, which supports parts in Lark and JSON schemas only")
    return text


def _unsupported(reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid grammar: {reason}.", param="grammar", code="invalid_grammar")
