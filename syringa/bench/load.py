"""A streaming load generator for `/v1/completions`, light enough to share a machine with the server it measures.

While the load runs it only records data and arrival times; HTTP framing, events and JSON are parsed afterwards. Every
request has its own connection, whose end marks the end of the response without parsing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from syringa.bench.framing import read_response
from syringa.errors import StartupError

Prompt = str | list[int]
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class CompletionResult(msgspec.Struct, kw_only=True):
    """One streamed completion. Times are seconds since the first request of the load was sent."""

    sent: float
    token_times: list[float] = []  # of chunks with text: one token each, unless the server merges chunks
    finished: float
    done: float | None = None  # when [DONE] arrived
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def last_token_time(self) -> float:
        """The end of the answer: its last tokens may have no text, such as end tokens under `ignore_eos`."""
        return self.token_times[-1] if self.done is None else self.done


class LoadResult(msgspec.Struct, kw_only=True):
    """The completions of one load run."""

    streams: int
    completions: list[CompletionResult]
    client_cpu_seconds: float

    @property
    def succeeded(self) -> list[CompletionResult]:
        return [completion for completion in self.completions if completion.error is None]

    @property
    def errors(self) -> list[str]:
        return [completion.error for completion in self.completions if completion.error is not None]

    @property
    def output_tokens(self) -> int:
        return sum(completion.output_tokens for completion in self.succeeded)

    @property
    def seconds(self) -> float:
        """Seconds from the first send to the last token."""
        return max((completion.last_token_time for completion in self.succeeded), default=0.0)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def client_cpu_share(self) -> float:
        """Client CPU time as a share of one core."""
        wall = max((completion.finished for completion in self.completions), default=0.0)
        return self.client_cpu_seconds / wall if wall else 0.0


def run_load(
    url: str,
    prompts: Sequence[Prompt],
    *,
    model: str,
    max_tokens: int,
    streams: int,
    api_key: str | None = None,
    timeout: float = 600.0,
    per_request: Sequence[dict[str, Any]] = (),
    **body: Any,
) -> LoadResult:
    """Complete `prompts` with `streams` concurrent requests: a stream sends its next prompt when its last has finished.

    `body` has fields for every request; `per_request` has further fields, used in rotation.
    """
    fields = {"model": model, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    target = LoadTarget(url, api_key)
    each = itertools.cycle(per_request or [{}])
    bodies = [{**fields, **body, **next(each), "prompt": prompt} for prompt in prompts]
    requests = [target.post("/v1/completions", body) for body in bodies]
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run_streams(target, requests, streams, timeout))


async def complete(target: LoadTarget, *, max_seconds: float = 600.0, **body: Any) -> CompletionResult:
    """Run one streamed completion. Times are relative to its own send, so `sent` is 0."""
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    connection = await _send_request(target, target.post("/v1/completions", {**fields, **body}), max_seconds)
    return _parse_completion(connection, connection.sent)


def fetch_json(url: str, path: str, *, api_key: str | None = None, timeout: float = 30.0) -> Any:
    """Return the JSON body of a GET. Raises `StartupError` if the request fails."""
    target = LoadTarget(url, api_key)

    async def fetch() -> _StreamConnection:
        return await _send_request(target, target.get(path), timeout)

    connection = asyncio.run(fetch())
    response = read_response(connection.chunks)
    if connection.failure or response.status != 200:
        raise StartupError(f"{url}{path}: {connection.failure or f'status {response.status}'}")
    try:
        return json.loads(response.body)
    except ValueError as error:
        raise StartupError(f"{url}{path} did not answer in JSON: {error}") from error


def first_model(url: str, *, api_key: str | None = None) -> str:
    """Return the first model that the server lists."""
    try:
        return str(fetch_json(url, "/v1/models", api_key=api_key)["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise StartupError(f"{url}/v1/models lists no model") from error


class LoadTarget:
    """A server's address, and requests to it as bytes."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise StartupError(f"cannot measure {url!r}: give a URL such as http://127.0.0.1:8000")
        self.host, self.port = parts.hostname, parts.port or 80
        # Base URLs often end with /v1, which is part of the paths here.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n{authorization}"

    def get(self, path: str) -> bytes:
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        payload = json.dumps(body).encode()
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload


class _StreamConnection(asyncio.Protocol):
    """A connection with one request: records the received data with arrival times."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.chunks: list[tuple[float, bytes]] = []
        self.sent = self.finished = time.perf_counter()
        self.failure: str | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports are no subclasses of it
        self.sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.chunks.append((time.perf_counter(), data))
        # A server that ignores `Connection: close` must not delay the stream's next request.
        if data.endswith(_LAST_CHUNK) or data == _LAST_CHUNK[2:]:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.finished = time.perf_counter()
        if error:
            self.failure = f"connection lost: {error}"
        if not self.done.done():
            self.done.set_result(None)


async def _send_request(target: LoadTarget, request: bytes, max_seconds: float) -> _StreamConnection:
    connection = _StreamConnection(request)
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(max_seconds):
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: connection, target.host, target.port)
            await connection.done
    except TimeoutError:
        connection.failure = f"no end within {max_seconds:.0f} s"
    except OSError as error:
        connection.failure = f"cannot connect: {error}"
    finally:
        if transport:
            transport.close()
    return connection


async def _run_streams(target: LoadTarget, requests: list[bytes], streams: int, max_seconds: float) -> LoadResult:
    connections: list[_StreamConnection | None] = [None] * len(requests)
    pending = iter(enumerate(requests))

    async def stream() -> None:
        for index, request in pending:
            connections[index] = await _send_request(target, request, max_seconds)

    cpu = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(requests))):
            group.create_task(stream())
    cpu = time.process_time() - cpu

    finished = [connection for connection in connections if connection is not None]
    origin = min((connection.sent for connection in finished), default=0.0)
    completions = [_parse_completion(connection, origin) for connection in finished]
    return LoadResult(streams=streams, completions=completions, client_cpu_seconds=cpu)


def _parse_completion(connection: _StreamConnection, origin: float) -> CompletionResult:
    """Parse a finished connection. A response without text, or cut before its end, is an error."""
    response = read_response(connection.chunks)
    result = CompletionResult(
        sent=connection.sent - origin, finished=connection.finished - origin, error=connection.failure
    )
    if result.error is None and response.status != 200:
        result.error = f"status {response.status}: {response.body[:300].decode('utf-8', 'replace')}"
    for arrived, data in response.events:
        if data == b"[DONE]":
            result.done = arrived - origin
        else:
            _apply_event(result, arrived - origin, data)
    if result.error is None and result.done is None:
        result.error = "the stream ended without [DONE]"
    if result.error is None and not result.token_times:
        result.error = "the answer has no text"
    result.output_tokens = result.output_tokens or len(result.token_times)
    return result


def _apply_event(result: CompletionResult, arrived: float, data: bytes) -> None:
    try:
        event = json.loads(data)
        if event.get("error"):
            result.error = f"error in the stream: {json.dumps(event['error'])[:300]}"
        if usage := event.get("usage"):
            result.output_tokens = usage["completion_tokens"]
            result.prompt_tokens = usage["prompt_tokens"]
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        # The first chunk may be empty, and a chunk with only the finish reason may follow the last token.
        text = "".join(choice.get("text") or "" for choice in event.get("choices") or [])
        if text:
            result.text += text
            result.token_times.append(arrived)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        result.error = f"an event that is no completion chunk: {data[:200]!r} ({error})"


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
