"""A streaming load generator for `/v1/completions`, light enough to share a machine with the server it measures.

While the clock runs it only stores what arrives and when; HTTP framing, events and JSON are read afterwards. One
connection per request, so that the end of the answer is the end of the connection and nothing has to be parsed to see
it.
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

from syringa.bench.framing import read_answer
from syringa.errors import StartupError

Prompt = str | list[int]
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Completion(msgspec.Struct, kw_only=True):
    """One streamed answer. Times are seconds since the first request of its load was sent."""

    sent: float
    token_times: list[float] = []  # of chunks with text: a chunk is a token, unless the server bundles them
    finished: float
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def time_to_first_token(self) -> float:
        return self.token_times[0] - self.sent


class Load(msgspec.Struct, kw_only=True):
    """What one run of a load gave."""

    streams: int
    completions: list[Completion]
    client_cpu_seconds: float

    @property
    def succeeded(self) -> list[Completion]:
        return [completion for completion in self.completions if completion.error is None]

    @property
    def errors(self) -> list[str]:
        return [completion.error for completion in self.completions if completion.error is not None]

    @property
    def output_tokens(self) -> int:
        return sum(completion.output_tokens for completion in self.succeeded)

    @property
    def seconds(self) -> float:
        """From the first send to the last token."""
        return max((completion.token_times[-1] for completion in self.succeeded), default=0.0)

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds if self.seconds else 0.0

    @property
    def client_cpu_share(self) -> float:
        """Of one core."""
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
    own: Sequence[dict[str, Any]] = (),
    **body: Any,
) -> Load:
    """Completes `prompts`, `streams` at a time: a stream sends its next prompt once its last answer has ended.

    `body` are fields of every request, and `own` those of each, in turn.
    """
    fields = {"model": model, "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
    target = Target(url, api_key)
    each = itertools.cycle(own or [{}])
    bodies = [{**fields, **body, **next(each), "prompt": prompt} for prompt in prompts]
    requests = [target.post("/v1/completions", body) for body in bodies]
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_drive(target, requests, streams, timeout))


async def complete(target: Target, *, patience: float = 600.0, **body: Any) -> Completion:
    """One streamed completion, for a load whose shape is the caller's. `sent` is 0: times count from there."""
    fields = {"stream": True, "stream_options": {"include_usage": True}}
    exchange = await _exchange(target, target.post("/v1/completions", {**fields, **body}), patience)
    return _completion(exchange, exchange.sent)


def fetch_json(url: str, path: str, *, api_key: str | None = None, timeout: float = 30.0) -> Any:
    """The body of a GET."""
    target = Target(url, api_key)

    async def fetch() -> _Exchange:
        return await _exchange(target, target.get(path), timeout)

    exchange = asyncio.run(fetch())
    answer = read_answer(exchange.arrivals)
    if exchange.failure or answer.status != 200:
        raise StartupError(f"{url}{path}: {exchange.failure or f'status {answer.status}'}")
    try:
        return json.loads(answer.body)
    except ValueError as error:
        raise StartupError(f"{url}{path} did not answer in JSON: {error}") from error


def first_model(url: str, *, api_key: str | None = None) -> str:
    """The name of the model that a server lists first."""
    try:
        return str(fetch_json(url, "/v1/models", api_key=api_key)["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise StartupError(f"{url}/v1/models lists no model") from error


class Target:
    """Where to connect, and how to write a request to it."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise StartupError(f"cannot measure {url!r}: give a URL such as http://127.0.0.1:8000")
        self.host, self.port = parts.hostname, parts.port or 80
        # Clients are often told to end the base URL with /v1; here the paths carry it.
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n{authorization}"

    def get(self, path: str) -> bytes:
        return f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode()

    def post(self, path: str, body: dict[str, Any]) -> bytes:
        payload = json.dumps(body).encode()
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n".encode() + payload


class _Exchange(asyncio.Protocol):
    """One connection with one request: keeps every piece of the answer with its time of arrival."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.arrivals: list[tuple[float, bytes]] = []
        self.sent = self.finished = time.perf_counter()
        self.failure: str | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance
        self.sent = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))
        # Servers close the connection as asked; one that does not would hold up the stream's next request.
        if data.endswith(_LAST_CHUNK) or data == _LAST_CHUNK[2:]:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.finished = time.perf_counter()
        if error:
            self.failure = f"connection lost: {error}"
        if not self.done.done():
            self.done.set_result(None)


async def _exchange(target: Target, request: bytes, patience: float) -> _Exchange:
    exchange = _Exchange(request)
    transport: asyncio.BaseTransport | None = None
    try:
        async with asyncio.timeout(patience):
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: exchange, target.host, target.port)
            await exchange.done
    except TimeoutError:
        exchange.failure = f"no end within {patience:.0f} s"
    except OSError as error:
        exchange.failure = f"cannot connect: {error}"
    finally:
        if transport:
            transport.close()
    return exchange


async def _drive(target: Target, requests: list[bytes], streams: int, patience: float) -> Load:
    exchanges: list[_Exchange | None] = [None] * len(requests)
    waiting = iter(enumerate(requests))

    async def stream() -> None:
        for index, request in waiting:
            exchanges[index] = await _exchange(target, request, patience)

    cpu = time.process_time()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(streams, len(requests))):
            group.create_task(stream())
    cpu = time.process_time() - cpu

    ended = [exchange for exchange in exchanges if exchange is not None]
    origin = min((exchange.sent for exchange in ended), default=0.0)
    return Load(streams=streams, completions=[_completion(each, origin) for each in ended], client_cpu_seconds=cpu)


def _completion(exchange: _Exchange, origin: float) -> Completion:
    """Reads what an exchange has stored. An answer without text, or cut before its end, is an error."""
    answer = read_answer(exchange.arrivals)
    result = Completion(sent=exchange.sent - origin, finished=exchange.finished - origin, error=exchange.failure)
    if result.error is None and answer.status != 200:
        result.error = f"status {answer.status}: {answer.body[:300].decode('utf-8', 'replace')}"
    ended = False
    for arrived, data in answer.events:
        if data == b"[DONE]":
            ended = True
        else:
            _take_event(result, arrived - origin, data)
    if result.error is None and not ended:
        result.error = "the stream ended without [DONE]"
    if result.error is None and not result.token_times:
        result.error = "the answer has no text"
    result.output_tokens = result.output_tokens or len(result.token_times)
    return result


def _take_event(result: Completion, arrived: float, data: bytes) -> None:
    try:
        event = json.loads(data)
        if event.get("error"):
            result.error = f"error in the stream: {json.dumps(event['error'])[:300]}"
        if usage := event.get("usage"):
            result.output_tokens = usage["completion_tokens"]
            result.prompt_tokens = usage["prompt_tokens"]
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        # The first chunk may be empty, and a last one with only the reason may follow the last token.
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
