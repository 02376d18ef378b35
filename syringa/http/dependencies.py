"""What handlers share: reading bodies and queries, the caller of a request, and JSON responses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
# What `curl -d` and libraries call a body whose type the client does not say.
_UNSAID = ("application/x-www-form-urlencoded", "application/octet-stream")


async def read_body(request: Request, wire_type: type[T], *, untyped: bool = False) -> tuple[T, list[str]]:
    """Return the decoded body, and the paths of unknown fields in it. `untyped`: see `check_json`."""
    check_json(request, untyped=untyped)
    body = await _read_all(request)
    log_request_body(body)
    if len(body) <= INLINE_BYTES:
        return decode(body, wire_type)
    release_memory_soon()
    return await asyncio.to_thread(decode, body, wire_type)


def check_json(request: Request, *, untyped: bool = False) -> None:
    """Raise `UnsupportedMediaType` for a body that is not JSON or is compressed, according to its headers.

    With `untyped`, content types are accepted that say nothing, such as that of `curl -d`. A page of another site can
    send them without asking the server first, but not without an `Origin`, which `HostMiddleware` refuses.
    """
    headers = request_context(request.scope).headers
    if (content_type := headers.get(b"content-type", _JSON)) != _JSON:
        kind = content_type.decode("latin-1").partition(";")[0].strip().lower()
        accepted = kind == "application/json" or kind.endswith("+json") or (untyped and kind in _UNSAID)
        if not accepted:
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


def read_page_query(query: QueryParams, *, default: int = 20, largest: int = MAX_PAGE_SIZE) -> PageQuery:
    order: Any = query.get("order", "desc")
    if order not in get_args(Order):
        raise InvalidRequest(f"order: expected {' or '.join(get_args(Order))}, not {order!r}.", param="order")
    limit = query_int(query, "limit", default, low=1, high=largest)
    return PageQuery(after=query.get("after") or None, before=query.get("before") or None, limit=limit, order=order)


def query_int(query: QueryParams, name: str, default: int, *, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20
    if not is_number or not low <= int(text) <= high:
        raise InvalidRequest(f"{name}: expected a whole number from {low} to {high}, not {text!r}.", param=name)
    return int(text)


def check_parameters(query: QueryParams, known: Sequence[str]) -> None:
    """Raise `InvalidRequest` for unknown parameters: ignoring a filter would return a wrong result."""
    for name in query:
        if name not in known:
            raise InvalidRequest(f"{name[:40]!r}: expected some of {', '.join(known)}.", param=name[:40])


def query_flag(query: QueryParams, name: str) -> bool:
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise InvalidRequest(f"{name}: expected true or false, not {text!r}.", param=name)
    return text == "true"
