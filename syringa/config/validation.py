"""Validation of settings, with error messages for people."""

from __future__ import annotations

import difflib
import json
import math
import types
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from syringa.config.specs import ReplicaCount, Replicas

Path = tuple[str | int, ...]

EXPECTED_REPLICAS = "a number from 1 to 256, MIN:MAX as text, or a table with min and max, which is not less than min"


class InvalidValue(Exception):
    """An invalid value and the path of its key. The reader of its source turns it into a `ConfigError`."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


def format_path(path: Path) -> str:
    """Format a path as `models[1].dtype`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def base_type(hint: Any) -> Any:
    """Return a type without its constraints and without None."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, types.UnionType):
            (hint,) = (each for each in get_args(hint) if each is not type(None))
        else:
            return hint


def check_value(path: Path, value: Any, hint: Any) -> Any:
    """Convert a value of a TOML file to a type, strictly: "8000" is not a number. Raises `InvalidValue`."""
    if not is_finite(value):
        raise InvalidValue(path, f"{format_path(path)} {format_value(value)}: expected a finite number")
    if base_type(hint) is Replicas:
        return _check_replicas(path, value)
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise InvalidValue(
            path, f"{format_path(path)} {format_value(value)}: expected {expected(hint, str(error))}"
        ) from None


def parse_replicas(value: Any) -> Replicas:
    """Return the replicas given as a number, as the text `3` or `1:3`, or as a table. Raises `ValueError`."""
    if isinstance(value, dict):
        if unknown := set(value) - {"min", "max"}:
            raise ValueError(f"unknown key {min(unknown)!r}")
        found = msgspec.convert({"max": value.get("min", 1), **value}, Replicas)
    else:
        first, separator, last = value.partition(":") if isinstance(value, str) else (value, "", "")
        low = msgspec.convert(first, ReplicaCount, strict=not isinstance(value, str))
        found = Replicas(min=low, max=msgspec.convert(last, ReplicaCount, strict=False) if separator else low)
    if found.max < found.min:
        raise ValueError("max is less than min")
    return found


def _check_replicas(path: Path, value: Any) -> Replicas:
    try:
        return parse_replicas(value)
    except ValueError as error:
        raise InvalidValue(path, f"{format_path(path)} {format_value(value)}: expected {EXPECTED_REPLICAS}") from error


def expected(hint: Any, message: str) -> str:
    """Describe the values of a type. `message`: the validation error of msgspec."""
    kind = base_type(hint)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "")
    if not wanted:
        wanted = "a list of texts" if get_origin(kind) is tuple else "a table"
    for sign, words in ((">= ", "at least"), ("<= ", "at most")):
        if sign in message:
            return f"{wanted}, {words} {message.split(sign)[1].split(' ')[0]}"
    return wanted


def unknown_key(path: Path, known: Collection[str], kind: str = "key") -> InvalidValue:
    """Return the error for a key that is not one of `known`."""
    name = str(path[-1])
    table = f"{format_path(path[:-1])}: " if path[:-1] else ""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"expected one of {', '.join(known)}"
    return InvalidValue(path, f"{table}unknown {kind} {name!r}; {hint}")


def format_value(value: Any) -> str:
    """Format a value as in a file, shortened if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
