"""What handlers share: who asks, what was sent, and how an answer without a stream looks."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar, get_args

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response

from syringa.api.decoding import decode, header_value
from syringa.config import Config
from syringa.errors import InvalidRequest, UnsupportedMediaType
from syringa.http.middleware.access_log import log_body
from syringa.service.auth.caller import Caller
from syringa.service.usage.account import Account
from syringa.store import Order

T = TypeVar("T", bound=msgspec.Struct)

MODE_HEADER = "x-syringa-responses-mode"
_MODES = ("openai", "open-responses")
MAX_PAGE = 100
_INLINE_BYTES = 1 << 18
_JSON = b"application/json"


async def read_body(request: Request, wire: type[T]) -> tuple[T, list[str]]:
    """The body, and the names in it that are not known."""
    check_json(request)
    body = await _whole_body(request)
    log_body(body)
    # Reading a large one takes a while, in which other requests must not wait.
    return decode(body, wire) if len(body) <= _INLINE_BYTES else await asyncio.to_thread(decode, body, wire)


def check_json(request: Request) -> None:
    """Raises `UnsupportedMediaType` for a body that says it is something else."""
    given = request.scope["state"]["given"]
    if (stated := given.get(b"content-type", _JSON)) != _JSON:
        kind = stated.decode("latin-1").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise UnsupportedMediaType(f"The body must be application/json, and is {kind}.")
    if (coded := given.get(b"content-encoding")) is not None:
        coding = coded.decode("latin-1").strip().lower()
        if coding != "identity":
            raise UnsupportedMediaType(f"The body must not be compressed, and is ({coding}).")


async def _whole_body(request: Request) -> bytes:
    """Most come in one part."""
    message = await request.receive()
    body: bytes = message.get("body", b"")
    if message["type"] == "http.request" and not message.get("more_body"):
        return body
    parts = [body]
    while message["type"] == "http.request" and message.get("more_body"):
        message = await request.receive()
        parts.append(message.get("body", b""))
    if message["type"] != "http.request":
        raise ClientDisconnect
    return b"".join(parts)


def heed(config: Config, ignored: list[str]) -> dict[str, str]:
    """The header that names unknown fields, or the refusal that the administrator asked for instead."""
    if ignored and config.unknown_fields == "refuse":
        raise InvalidRequest(
            f"{ignored[0]!r} is not honoured here, and this server refuses what it would ignore.", param=ignored[0]
        )
    return {"x-syringa-ignored": header_value(ignored)} if ignored else {}


def caller(connection: HTTPConnection) -> Caller:
    """Who asks."""
    found: Caller = connection.scope["state"]["caller"]
    return found


def account(connection: HTTPConnection) -> Account:
    """The request's entry in the books; only what generates something has one."""
    found: Account = connection.scope["state"]["account"]
    return found


def organisation(connection: HTTPConnection) -> str:
    """Whose data a request may see; without keys there is only one organisation."""
    return caller(connection).organisation


def open_mode(connection: HTTPConnection, config: Config) -> bool:
    """Whether the client speaks Open Responses, which names some events differently from OpenAI."""
    mode = connection.headers.get(MODE_HEADER, config.responses_mode).strip().lower()
    if mode not in _MODES:
        raise InvalidRequest(f"{MODE_HEADER}: expected {' or '.join(_MODES)}, not {mode!r}.", param=MODE_HEADER)
    return mode == "open-responses"


def json(value: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")


class PageQuery(msgspec.Struct, kw_only=True):
    """Which part of a list is wanted."""

    after: str | None
    before: str | None
    limit: int
    order: Order


def page_query(query: QueryParams) -> PageQuery:
    order: Any = query.get("order") or "desc"
    if order not in get_args(Order):
        raise InvalidRequest(f"order: expected {' or '.join(get_args(Order))}, not {order!r}.", param="order")
    limit = whole_number(query, "limit", 20, low=1, high=MAX_PAGE)
    return PageQuery(after=query.get("after") or None, before=query.get("before") or None, limit=limit, order=order)


def whole_number(query: QueryParams, name: str, default: int, *, low: int, high: int) -> int:
    text = query.get(name)
    if text is None or text == "":
        return default
    plain = text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20
    if not plain or not low <= int(text) <= high:
        raise InvalidRequest(f"{name}: expected a whole number from {low} to {high}, not {text!r}.", param=name)
    return int(text)


def truth(query: QueryParams, name: str) -> bool:
    text = query.get(name, "").lower()
    values = {"true": True, "1": True, "false": False, "0": False, "": False}
    if text not in values:
        raise InvalidRequest(f"{name}: expected true or false, not {text!r}.", param=name)
    return values[text]
