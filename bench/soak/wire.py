"""One HTTP request on a connection of its own, with everything that can go wrong with it recorded."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from syringa.bench.framing import read_response

READ_BYTES = 1 << 16
LIMIT_SECONDS = 300.0  # after which a request counts as hanging: 200 clients share two cores
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed", "response.cancelled", "error"})


class Address(msgspec.Struct, frozen=True):
    host: str
    port: int


class Reply(msgspec.Struct, kw_only=True):
    """What became of one request."""

    began: float  # time.monotonic()
    ended: float = 0.0
    local_port: int = 0  # 0: not connected
    status: int = 0  # 0: no response
    headers: dict[str, str] = {}
    body: bytes = b""
    events: list[bytes] = []
    failure: str = ""  # "refused", "lost", "hang", "left" (by this client); empty: the response is complete

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def is_stream(self) -> bool:
        return self.headers.get("content-type", "").startswith("text/event-stream")

    @property
    def has_terminal_event(self) -> bool:
        return bool(self.events) and is_terminal(self.events[-1])

    @property
    def error(self) -> ErrorDetails | None:
        """The error of the body, or of the last event of a stream. None if there is none in the error envelope."""
        raw = (self.events[-1] if self.events else b"") if self.is_stream else self.body
        error = error_details(raw)
        if error is not None and error.code is None:
            error.code = _CODES.get(self.status)
        return error


_CODES = {503: "engine_overloaded", 504: "timeout"}  # of errors that have none, as in Anthropic's and Ollama's APIs


class ErrorDetails(msgspec.Struct):
    message: str
    code: str | None = None
    type: str | None = None


class _Envelope(msgspec.Struct):
    error: ErrorDetails | str  # Ollama's API has a text


class _Kind(msgspec.Struct):
    """What tells whether an event ends its stream."""

    type: str = ""
    error: Any = None


class _Response(msgspec.Struct):
    error: ErrorDetails | None = None


class _Event(msgspec.Struct):
    """An event of either API; a chat chunk has none of these fields."""

    type: str = ""
    error: ErrorDetails | None = None
    response: _Response | None = None
    message: str = ""
    code: str | None = None


_decode_kind = msgspec.json.Decoder(_Kind).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_envelope = msgspec.json.Decoder(_Envelope).decode


def is_terminal(data: bytes) -> bool:
    """Whether an event ends its stream: `[DONE]`, a final event of a response, or an error."""
    if data == b"[DONE]":
        return True
    try:
        event = _decode_kind(data)
    except msgspec.DecodeError:
        return False
    return event.type in _ENDS or event.error is not None


def error_details(data: bytes) -> ErrorDetails | None:
    with contextlib.suppress(msgspec.DecodeError):
        error = _decode_envelope(data).error
        return ErrorDetails(error) if isinstance(error, str) else error
    with contextlib.suppress(msgspec.DecodeError):
        event = _decode_event(data)
        if event.type == "error":
            return event.error or ErrorDetails(event.message, event.code)
        if event.type == "response.failed" and event.response is not None:
            return event.response.error
    return None


def encode_request(address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes | None) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", f"Host: {address.host}:{address.port}", "Connection: close"]
    given = {name.lower() for name in headers}
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        if "content-type" not in given:
            lines.append("Content-Type: application/json")
        lines.append(f"Content-Length: {len(body)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "replace") + (body or b"")


def encode_form(fields: Mapping[str, str]) -> tuple[str, bytes]:
    """Return the content type and the body of a form."""
    boundary = "soak-form-boundary"
    parts = [
        f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    ]
    return f"multipart/form-data; boundary={boundary}", "".join([*parts, f"--{boundary}--\r\n"]).encode()


async def exchange(
    address: Address, request: bytes, *, leave_after: float | None = None, limit: float = LIMIT_SECONDS
) -> Reply:
    """Send a request and read the response. `leave_after`: seconds after which the client disconnects."""
    reply = Reply(began=time.monotonic())
    chunks: list[tuple[float, bytes]] = []
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(limit if leave_after is None else min(limit, leave_after)):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            reply.local_port = writer.get_extra_info("sockname")[1]
            writer.write(request)
            while data := await reader.read(READ_BYTES):
                chunks.append((0.0, data))
    except TimeoutError:
        reply.failure = "left" if leave_after is not None and leave_after < limit else "hang"
    except OSError:
        reply.failure = "lost" if reply.local_port else "refused"
    finally:
        if writer is not None:
            writer.transport.abort()
    reply.ended = time.monotonic()
    _parse(reply, chunks)
    return reply


def _parse(reply: Reply, chunks: list[tuple[float, bytes]]) -> None:
    raw = b"".join([data for _, data in chunks])
    head, separator, body = raw.partition(b"\r\n\r\n")
    if not separator:
        reply.failure = reply.failure or "lost"
        return
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.decode("latin-1").partition(":")
        reply.headers[name.lower()] = value.strip()
    response = read_response([(0.0, raw)])
    reply.status, reply.body = response.status, response.body
    if reply.is_stream:
        reply.events = [data for _, data in response.events]
    length = reply.headers.get("content-length")
    complete = len(body) == int(length) if length is not None else raw.endswith(b"0\r\n\r\n")
    if complete:
        reply.failure = ""  # it ended before the client left
    elif not reply.failure:
        reply.failure = "lost"
