"""Whether a value is one that a setting can have, and in words what it should have been."""

from __future__ import annotations

import difflib
import json
import math
import types
from collections.abc import Collection
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

Path = tuple[str | int, ...]


class Fault(Exception):
    """A value that cannot be, and the key that it belongs to. Whoever knows the source makes a `ConfigError` of it."""

    def __init__(self, path: Path, message: str) -> None:
        super().__init__(message)
        self.path, self.message = path, message


def spell(path: Path) -> str:
    """A path as people write it: `models[1].dtype`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def bare(hint: Any) -> Any:
    """A type without its constraints, and without the None that stands for nothing said."""
    while True:
        if get_origin(hint) is Annotated:
            hint = get_args(hint)[0]
        elif get_origin(hint) in (Union, types.UnionType):
            (hint,) = (each for each in get_args(hint) if each is not type(None))
        else:
            return hint


def check(path: Path, value: Any, hint: Any) -> Any:
    """A value of a file as the type says, or a `Fault`. There, "8000" is a text and a mistake."""
    if not is_finite(value):
        raise Fault(path, f"{spell(path)} {shown(value)}: expected a finite number")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        raise Fault(path, f"{spell(path)} {shown(value)}: expected {expected(hint, str(error))}") from None


def expected(hint: Any, said: str) -> str:
    """What a value should have been. `said`: what msgspec says of it."""
    kind = bare(hint)
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(get_args(kind))
    wanted = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(kind, "")
    if not wanted:
        wanted = "a list of texts" if get_origin(kind) is tuple else "a table"
    for sign, words in ((">= ", "at least"), ("<= ", "at most")):
        if sign in said:
            return f"{wanted}, {words} {said.split(sign)[1].split(' ')[0]}"
    return wanted


def unknown(path: Path, known: Collection[str], kind: str = "key") -> Fault:
    """The name at the end of `path` is none of those."""
    name = str(path[-1])
    table = f"{spell(path[:-1])}: " if path[:-1] else ""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
    return Fault(path, f"{table}unknown {kind} {name!r}; {hint}")


def shown(value: Any) -> str:
    """As a file would write it, cut where it is long."""
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
