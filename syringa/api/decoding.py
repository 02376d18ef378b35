"""From the bytes of a body to a checked wire type, with errors that name the field.

Wire types are msgspec structs whose fields may all be absent; `null` means absent. Types and ranges stand in the
annotations, so that the published schema and the checks are one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import msgspec

from syringa.api.fields.annotations import says
from syringa.api.models.served_model import ServedModel
from syringa.errors import InvalidRequest
from syringa.events import Event, GenerationRequest
from syringa.output.collect import Generation

T = TypeVar("T", bound=msgspec.Struct)

MOST_NAMED = 100  # of the fields that are not known; a header has no room for more

_decoder = msgspec.json.Decoder()
_AT = re.compile(r"(?s)^(?P<said>.*?)(?: - at `(?P<key>key in )?\$(?P<path>.*)`)?$")
_MISSING = re.compile("missing required field `(?P<name>.*)`")


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: Annotated[str | None, says("The JSON path of the field that is at fault.")]
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    """What every error looks like, on every endpoint."""

    error: ErrorBody


class Writer(Protocol):
    """An endpoint's answer in its wire format. Holds the state of one request."""

    def write(self, event: Event) -> Sequence[msgspec.Struct | msgspec.Raw]:
        """The chunks that one event becomes; `Raw`: one that is JSON already."""
        ...

    def around_text(self) -> tuple[bytes, bytes] | None:
        """From now on, the chunk of a `TextDelta` of the first choice is its text, as JSON, between these; None: it
        takes more."""
        ...

    def render(self, generation: Generation) -> msgspec.Struct:
        """The whole body, from the same events."""
        ...


@dataclass(frozen=True, kw_only=True)
class Call:
    """What an endpoint makes of a body: what to generate, and how to write it."""

    request: GenerationRequest
    writer: Writer
    model: ServedModel
    stream: bool = False


def decode(body: bytes, wire: type[T]) -> tuple[T, list[str]]:
    """The body as a `wire` value, and the names that it has beyond those."""
    ignored: list[str] = []
    return convert(decode_object(body), wire, ignored=ignored), ignored


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body holds."""
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


def _decode_wide_numbers(body: bytes) -> Any:
    """Numbers that msgspec refuses become infinite here, so that the range check can name their field."""

    def whole(text: str) -> int | float:
        return int(text) if len(text) < 1000 else float("-inf" if text[0] == "-" else "inf")

    def constant(text: str) -> Any:
        raise InvalidRequest(f"The body is not valid JSON: {text} is not a JSON number.")

    try:
        value = json.loads(body, parse_int=whole, parse_constant=constant)
        json.dumps(value, ensure_ascii=False).encode()  # unlike msgspec, this decoder lets halves of characters pass
        return value
    except UnicodeEncodeError:
        raise InvalidRequest("The body has half of a surrogate pair in a string.") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None


def convert(fields: Any, wire: type[T], *, path: str = "", ignored: list[str] | None = None) -> T:
    """`fields` as a `wire` value; an error's `param` starts with `path`. Unknown names are added to `ignored`."""
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{path}: expected an object.", param=path or None)
    known, whole, wholes = _plan(wire)
    kept = {}
    for name, value in fields.items():
        if value is None:
            continue
        if name not in known:
            if ignored is not None and len(ignored) < MOST_NAMED:
                ignored.append(f"{path}.{name}" if path else name)
            continue
        if type(value) is float and name in whole:
            value = _as_int(value)
        elif type(value) is list and name in wholes and any(type(item) is float for item in value):
            value = [_as_int(item) if type(item) is float else item for item in value]
        kept[name] = value
    try:
        return msgspec.convert(kept, wire)
    except msgspec.ValidationError as error:
        raise _invalid(error, path) from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.") from None


def _as_int(value: float) -> float | int:
    return int(value) if value.is_integer() else value


_plans: dict[type, tuple[frozenset[str], frozenset[str], frozenset[str]]] = {}


def _plan(wire: type[msgspec.Struct]) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """A wire type's field names, those that are whole numbers, and those that are lists of them."""
    if wire not in _plans:
        info = msgspec.inspect.type_info(wire)
        assert isinstance(info, msgspec.inspect.StructType)
        whole = {field.encode_name for field in info.fields if _mentions(field.type, in_list=False)}
        wholes = {field.encode_name for field in info.fields if _mentions(field.type, in_list=True)}
        names = frozenset(field.encode_name for field in info.fields)
        _plans[wire] = names, frozenset(whole), frozenset(wholes)
    return _plans[wire]


def _mentions(kind: msgspec.inspect.Type, *, in_list: bool) -> bool:
    if isinstance(kind, msgspec.inspect.Metadata):
        return _mentions(kind.type, in_list=in_list)
    if isinstance(kind, msgspec.inspect.UnionType):
        return any(_mentions(each, in_list=in_list) for each in kind.types)
    if in_list and isinstance(kind, msgspec.inspect.ListType):
        return _mentions(kind.item_type, in_list=False)
    return not in_list and isinstance(kind, msgspec.inspect.IntType)


def _invalid(error: msgspec.ValidationError, path: str) -> InvalidRequest:
    found = _AT.match(str(error))
    said, where = (found["said"], found["path"] or "") if found else (str(error), "")
    missing = _MISSING.search(said)
    param = (path + where).lstrip(".") or (missing["name"] if missing else None)
    said = said.replace("`", "").replace(" | null", "")
    said = said[:1].lower() + said[1:]
    return InvalidRequest(f"{param}: {said}." if param else f"{said}.", param=param)


def header_value(names: list[str]) -> str:
    """Field names fit for a response header: what is not plain ASCII is escaped, and a list of more than 1 KiB ends
    with the last name that fits."""
    shown = (name[:1024].encode("unicode_escape").decode("ascii").replace(",", "\\x2c") for name in names[:MOST_NAMED])
    text = ", ".join(shown)
    if len(text) <= 1024:
        return text
    head = text[:1019].rpartition(", ")[0]
    return f"{head}, ..." if head else text[:1021] + "..."
