"""Decoding of request bodies into wire types, with errors that name the invalid field.

Wire types are msgspec structs; `null` means that a field is absent. Types and ranges are declared in the annotations,
from which the published schema is generated too.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from typing import Any, TypeVar

import msgspec

from syringa.errors import InvalidRequest, PayloadTooLarge

T = TypeVar("T", bound=msgspec.Struct)

MAX_IGNORED_FIELDS = 100  # reported in the response header
MAX_VALUES = 1_000_000  # strings, objects and arrays in a body; each takes up to 250 bytes of memory, however short
# Far below the interpreter's recursion limit, so that values that were decoded can be rendered, encoded and read again.
MAX_DEPTH = 500

_SCANNED_BYTES = 1 << 16
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_BRACKET_SIGNS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_decoder = msgspec.json.Decoder()
_AT = re.compile(r"(?s)^(?P<reason>.*?)(?: - at `(?P<key>key in )?\$(?P<path>.*)`)?$")
_MISSING = re.compile("missing required field `(?P<name>.*)`")


def decode(body: bytes, wire: type[T]) -> tuple[T, list[str]]:
    """Decode a body into a `wire` value. Also returns the names of fields that `wire` does not have."""
    ignored: list[str] = []
    return convert(decode_object(body), wire, ignored=ignored), ignored


def decode_object(body: bytes) -> dict[str, Any]:
    """Decode a body that has to be a JSON object. Raises `InvalidRequest`, or `PayloadTooLarge` for too many values."""
    if _has_too_many_values(body):
        raise PayloadTooLarge(f"The body has more than {MAX_VALUES:,} strings, objects and arrays.")
    if _is_too_deep(body):
        raise InvalidRequest("The body is nested too deeply.")
    try:
        value = _decoder.decode(body)
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8 (byte {error.start} of a string).") from None
    except msgspec.ValidationError:
        value = _decode_wide_numbers(body)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def _has_too_many_values(body: bytes) -> bool:
    """Return whether a body has more than `MAX_VALUES` strings, objects and arrays, without decoding it."""
    # Brackets and quotation marks inside of strings count as well at first: few bodies have so many of them.
    if len(body) <= 2 * MAX_VALUES or _count_brackets(body) + body.count(b'"') // 2 <= MAX_VALUES:
        return False
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = quotes = 0
    for start in range(0, len(unescaped), _SCANNED_BYTES):
        parts = unescaped[start : start + _SCANNED_BYTES].split(b'"')
        brackets += _count_brackets(b"".join(parts[quotes % 2 :: 2]))  # every other part is in a string
        quotes += len(parts) - 1
        if brackets + quotes // 2 > MAX_VALUES:
            return True
    return False


def _is_too_deep(body: bytes) -> bool:
    """Return whether a body has more than `MAX_DEPTH` objects and arrays inside of each other, without decoding it."""
    if len(body) <= 2 * MAX_DEPTH or _count_brackets(body) <= MAX_DEPTH:
        return False
    signs = _STRING.sub(b"", body).translate(_BRACKET_SIGNS, _NOT_BRACKETS)
    return max(itertools.accumulate(memoryview(signs).cast("b")), default=0) > MAX_DEPTH


def _count_brackets(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


def _decode_wide_numbers(body: bytes) -> Any:
    """Decode a body with numbers that msgspec refuses; they become infinite, so the range check names the field."""

    def parse_int(text: str) -> int | float:
        return int(text) if len(text) < 1000 else float("-inf" if text[0] == "-" else "inf")

    def parse_constant(text: str) -> Any:
        raise InvalidRequest(f"The body is not valid JSON: {text} is not a JSON number.")

    try:
        value = json.loads(body, parse_int=parse_int, parse_constant=parse_constant)
        json.dumps(value, ensure_ascii=False).encode()  # unlike msgspec, json accepts lone surrogates
        return value
    except UnicodeEncodeError:
        raise InvalidRequest("The body has half of a surrogate pair in a string.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None


def convert(fields: Any, wire: type[T], *, path: str = "", ignored: list[str] | None = None) -> T:
    """Convert decoded JSON to a `wire` value. Raises `InvalidRequest`, whose `param` starts with `path`.

    The paths of unknown fields are appended to `ignored`.
    """
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{path}: expected an object.", param=path or None)
    known, integers, integer_lists = _field_types(wire)
    kept = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in known:
            if ignored is not None and len(ignored) < MAX_IGNORED_FIELDS:
                ignored.append(f"{path}.{name}" if path else name)
            continue
        if type(value) is float and name in integers:
            value = _as_int(value)
        elif type(value) is list and name in integer_lists and any(type(item) is float for item in value):
            value = [_as_int(item) if type(item) is float else item for item in value]
        kept[name] = value
    try:
        return msgspec.convert(kept, wire)
    except msgspec.ValidationError as error:
        raise _to_invalid_request(error, path) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def _as_int(value: float) -> float | int:
    return int(value) if value.is_integer() else value


@functools.cache
def _field_types(wire: type[msgspec.Struct]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Return a wire type's field names, those of integer fields, and those of fields that are lists of integers."""
    info = msgspec.inspect.type_info(wire)
    assert isinstance(info, msgspec.inspect.StructType)
    integers = frozenset(field.encode_name for field in info.fields if _is_integer(field.type, in_list=False))
    integer_lists = frozenset(field.encode_name for field in info.fields if _is_integer(field.type, in_list=True))
    return frozenset(field.encode_name for field in info.fields), integers, integer_lists


def _is_integer(kind: msgspec.inspect.Type, *, in_list: bool) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _is_integer(kind.type, in_list=in_list)
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(_is_integer(each, in_list=in_list) for each in kind.types)
    if in_list and isinstance(kind, msgspec.inspect.ListType):
        return _is_integer(kind.item_type, in_list=False)
    return not in_list and isinstance(kind, msgspec.inspect.IntType)


def _to_invalid_request(error: msgspec.ValidationError, path: str) -> InvalidRequest:
    found = _AT.match(str(error))
    reason, where = (found["reason"], found["path"] or "") if found else (str(error), "")
    missing = _MISSING.search(reason)
    param = (path + where).lstrip(".") or (missing["name"] if missing else None)
    reason = reason.replace("`", "").replace(" | null", "")
    reason = reason[:1].lower() + reason[1:]
    return InvalidRequest(f"{param}: {reason}." if param else f"{reason}.", param=param)


def header_value(names: list[str]) -> str:
    """Return field names as the value of a response header: ASCII, at most 1 KiB, cut after the last name that fits."""
    shown = (
        name[:1024].encode("unicode_escape").decode("ascii").replace(",", "\\x2c")
        for name in names[:MAX_IGNORED_FIELDS]
    )
    text = ", ".join(shown)
    if len(text) <= 1024:
        return text
    head = text[:1019].rpartition(", ")[0]
    return f"{head}, ..." if head else text[:1021] + "..."
