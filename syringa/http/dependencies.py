"""What handlers share: reading bodies and queries, the caller of a request, and JSON responses."""

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
from syringa.http.context import request_context
from syringa.http.memory import release_memory_soon
from syringa.http.middleware.access_log import log_request_body
from syringa.service.auth.keys import Caller
from syringa.service.usage.accounting import RequestAccounting
from syringa.store import Order

T = TypeVar("T", bound=msgspec.Struct)

MODE_HEADER = "x-syringa-responses-mode"
_MODES = ("openai", "open-responses")
MAX_PAGE_SIZE = 100
INLINE_BYTES = 1 << 18  # larger bodies are decoded in a thread, so that other requests do not wait
_JSON = b"application/json"


async def read_body(request: Request, wire_type: type[T]) -> tuple[T, list[str]]:
    """Return the decoded body, and the paths of unknown fields in it."""
    check_json(request)
    body = await _read_all(request)
    log_request_body(body)
    if len(body) <= INLINE_BYTES:
        return decode(body, wire_type)
    release_memory_soon()
    return await asyncio.to_thread(decode, body, wire_type)


def check_json(request: Request) -> None:
    """Raise `UnsupportedMediaType` for a body that is not JSON or is compressed, according to its headers."""
    headers = request_context(request.scope).headers
    if (content_type := headers.get(b"content-type", _JSON)) != _JSON:
        kind = content_type.decode("latin-1").partition(";")[0].strip().lower()
        if kind != "application/json" and not kind.endswith("+json"):
            raise UnsupportedMediaType(f"The body must be application/json, not {kind}.")
    if (encoding := headers.get(b"content-encoding")) is not None:
        coding = encoding.decode("latin-1").strip().lower()
        if coding != "identity":
            raise UnsupportedMediaType(f"The body must not be compressed, but has the content-encoding {coding}.")


async def _read_all(request: Request) -> bytes:
    message = await request.receive()  # most bodies arrive in one message
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


def ignored_fields_header(config: Config, ignored: list[str]) -> dict[str, str]:
    """Return the header that names unknown fields. Raises `InvalidRequest` where `unknown_fields` is `refuse`."""
    if ignored and config.unknown_fields == "refuse":
        raise InvalidRequest(
            f"{ignored[0]!r} is not supported, and this server rejects unsupported fields.",
            param=ignored[0].partition(" ")[0],
        )
    return {"x-syringa-ignored": header_value(ignored)} if ignored else {}


def caller(connection: HTTPConnection) -> Caller:
    caller = request_context(connection.scope).caller
    assert caller is not None, "public endpoints have no caller"
    return caller


def accounting(connection: HTTPConnection) -> RequestAccounting:
    """Return the accounting of a request to a metered endpoint."""
    accounting = request_context(connection.scope).accounting
    assert accounting is not None, "only metered endpoints have accounting"
    return accounting


def organization(connection: HTTPConnection) -> str:
    """Return the organization whose data the request may access; without API keys there is only one."""
    return caller(connection).organization


def open_mode(connection: HTTPConnection, config: Config) -> bool:
    """Whether the client uses Open Responses, which names some events differently from OpenAI."""
    mode = connection.headers.get(MODE_HEADER, config.responses_mode).strip().lower()
    if mode not in _MODES:
        raise InvalidRequest(f"{MODE_HEADER}: expected {' or '.join(_MODES)}, not {mode!r}.", param=MODE_HEADER)
    return mode == "open-responses"


def json(value: object, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), headers=headers, media_type="application/json")


class PageQuery(msgspec.Struct, kw_only=True):
    """The page of a list that a query selects."""

    after: str | None
    before: str | None
    limit: int
    order: Order


def read_page_query(query: QueryParams) -> PageQuery:
    order: Any = query.get("order") or "desc"
    if order not in get_args(Order):
        raise InvalidRequest(f"order: expected {' or '.join(get_args(Order))}, not {order!r}.", param="order")
    limit = query_int(query, "limit", 20, low=1, high=MAX_PAGE_SIZE)
    return PageQuery(after=query.get("after") or None, before=query.get("before") or None, limit=limit, order=order)


def query_int(query: QueryParams, name: str, default: int, *, low: int, high: int) -> int:
    text = query.get(name)
    if text is None or text == "":
        return default
    is_number = text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20
    if not is_number or not low <= int(text) <= high:
        raise InvalidRequest(f"{name}: expected a whole number from {low} to {high}, not {text!r}.", param=name)
    return int(text)


def query_flag(query: QueryParams, name: str) -> bool:
    text = query.get(name, "false").lower()
    values = {"true": True, "1": True, "false": False, "0": False}
    if text not in values:
        raise InvalidRequest(f"{name}: expected true or false, not {text!r}.", param=name)
    return values[text]
