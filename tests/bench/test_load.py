"""The load generator against a scripted server, and response parsing with arbitrary chunk boundaries."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syringa.bench.framing import read_response
from syringa.bench.load import LoadResult, LoadTarget, complete, fetch_json, first_model, run_load
from syringa.errors import StartupError

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


class FakeServer:
    """Streams `tokens` chunks per request. Records request bodies, and the maximum concurrency in `max_concurrent`."""

    def __init__(self) -> None:
        self.tokens = 5
        self.delay = 0.0
        self.usage = True
        self.done = True
        self.status = b"200 OK"
        self.error_event = b""
        self.bodies: list[dict[str, object]] = []
        self.heads: list[bytes] = []
        self.concurrent = self.max_concurrent = 0

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if head.startswith(b"GET"):
            self._json(writer, {"data": [{"id": "fake"}]})
        else:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            body = json.loads(await reader.readexactly(length))
            self.bodies.append(body)
            self.concurrent += 1
            self.max_concurrent = max(self.max_concurrent, self.concurrent)
            if self.status == b"200 OK":
                await self._stream(writer, self.to_response_usage(body))
            else:
                self._json(writer, {"error": {"message": "no"}})
            self.concurrent -= 1
        await writer.drain()
        writer.close()

    def to_response_usage(self, body: dict[str, object]) -> object:
        return 64

    async def _stream(self, writer: asyncio.StreamWriter, generated: object) -> None:
        writer.write(HEAD)
        for index in range(self.tokens):
            await asyncio.sleep(self.delay)
            self._event(writer, {"choices": [{"text": f" {index}"}], "usage": None})
        self._event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        if self.error_event:
            self._chunk(writer, b"data: " + self.error_event + b"\n\n")
        if self.usage:
            details = {"cached_tokens": 3}
            usage = {"completion_tokens": generated, "prompt_tokens": 7, "prompt_tokens_details": details}
            self._event(writer, {"choices": [], "usage": usage})
        if self.done:
            self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")

    def _event(self, writer: asyncio.StreamWriter, event: object) -> None:
        self._chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, writer: asyncio.StreamWriter, body: object) -> None:
        payload = json.dumps(body).encode()
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (self.status, len(payload), payload))


@contextmanager
def serving(fake: FakeServer) -> Iterator[str]:
    """Serve in a thread of its own, since the load generator runs its own event loop."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.respond, "127.0.0.1", 0))
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield url
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        loop.run_until_complete(_cancel_remaining_tasks())
        loop.close()


async def _cancel_remaining_tasks() -> None:
    """Cancel responses whose client has gone, so that they do not outlive the test."""
    remaining = asyncio.all_tasks() - {asyncio.current_task()}
    for task in remaining:
        task.cancel()
    await asyncio.gather(*remaining, return_exceptions=True)


def load(fake: FakeServer, count: int = 1, streams: int = 1, **options: object) -> LoadResult:
    with serving(fake) as url:
        prompts = [f"prompt {index}" for index in range(count)]
        return run_load(url, prompts, model="fake", max_tokens=64, streams=streams, **options)  # type: ignore[arg-type]


def test_run_load_counts_tokens_by_server_usage() -> None:
    (completion,) = load(FakeServer()).completions
    assert completion.error is None
    assert completion.text == " 0 1 2 3 4"
    assert (completion.output_tokens, completion.prompt_tokens, completion.cached_tokens) == (64, 7, 3)


def test_run_load_counts_chunks_without_usage() -> None:
    fake = FakeServer()
    fake.usage = False
    assert load(fake).output_tokens == 5


def test_run_load_times_tokens_from_first_send() -> None:
    fake = FakeServer()
    fake.delay = 0.03
    result = load(fake)
    (completion,) = result.completions
    assert len(completion.token_times) == 5
    assert completion.time_to_first_token >= 0.025
    # No token arrives before it was sent. On a busy machine, several may be read at once.
    assert all(at >= 0.025 * number for number, at in enumerate(completion.token_times, 1))
    assert completion.token_times == sorted(completion.token_times)
    assert completion.done is not None
    assert result.seconds == completion.done >= completion.token_times[-1]
    assert result.tokens_per_second == pytest.approx(64 / result.seconds)
    assert 0 < result.client_cpu_share < 1


def test_run_load_keeps_streams_busy_and_sends_each_prompt_once() -> None:
    fake = FakeServer()
    fake.delay = 0.05
    result = load(fake, count=10, streams=4)
    assert fake.max_concurrent == 4
    assert sorted(str(body["prompt"]) for body in fake.bodies) == sorted(f"prompt {index}" for index in range(10))
    assert result.output_tokens == 640


def test_run_load_sends_streaming_options_and_extra_fields() -> None:
    fake = FakeServer()
    load(fake, api_key="secret", ignore_eos=True, temperature=0)
    assert fake.bodies[0] == {
        "model": "fake",
        "prompt": "prompt 0",
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "temperature": 0,
    }
    assert b"Authorization: Bearer secret\r\n" in fake.heads[0]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("status", b"503 Busy", "status 503"),
        ("done", False, "without [DONE]"),
        ("tokens", 0, "no text"),
        ("error_event", b'{"error": {"message": "engine died"}}', "engine died"),
        ("error_event", b"not json", "no completion chunk"),
        ("error_event", b"[1]", "no completion chunk"),
    ],
)
def test_run_load_reports_failed_response_without_tokens(field: str, value: object, message: str) -> None:
    fake = FakeServer()
    setattr(fake, field, value)
    result = load(fake)
    assert message in result.errors[0]
    assert result.output_tokens == 0
    assert result.tokens_per_second == 0


def test_run_load_reports_timeout_and_refused_connection() -> None:
    fake = FakeServer()
    fake.delay = 0.2
    assert "no end within" in load(fake, timeout=0.05).errors[0]
    gone = run_load("http://127.0.0.1:1", ["x"], model="m", max_tokens=1, streams=1)
    assert "cannot connect" in gone.errors[0]


def test_complete_times_from_its_own_send() -> None:
    fake = FakeServer()
    with serving(fake) as url:
        completion = asyncio.run(complete(LoadTarget(url, "key"), model="fake", prompt="one", max_tokens=3))
        fake.status = b"503 Overloaded"
        refused = asyncio.run(complete(LoadTarget(url), model="fake", prompt="two"))
    assert (completion.error, completion.sent, len(completion.token_times), completion.output_tokens) == (
        None,
        0,
        5,
        64,
    )
    assert completion.time_to_first_token == completion.token_times[0] > 0
    usage = {"include_usage": True}
    assert fake.bodies[0] == {
        "stream": True, "stream_options": usage, "model": "fake", "prompt": "one", "max_tokens": 3,
    }  # fmt: skip
    assert b"Authorization: Bearer key" in fake.heads[0]
    assert "503" in (refused.error or "")


def test_first_model() -> None:
    with serving(FakeServer()) as url:
        assert first_model(url) == "fake"
        assert first_model(f"{url}/v1/") == "fake"
    with pytest.raises(StartupError, match="cannot connect"):
        fetch_json("http://127.0.0.1:1", "/v1/models")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "https://example.com", "http://"])
def test_load_target_rejects_unsupported_url(url: str) -> None:
    with pytest.raises(StartupError, match="cannot measure"):
        LoadTarget(url)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_read_response_handles_any_chunk_boundary(size: int, newline: bytes) -> None:
    events = [b'{"a": 1}', "çé".encode(), b"[DONE]"]
    wire = HEAD
    for event in events:
        data = b": comment" + newline + b"data: " + event + newline * 2
        wire += b"%x;ext=1\r\n%b\r\n" % (len(data), data)
    wire += b"0\r\n\r\n"
    arrivals = [(float(start), wire[start : start + size]) for start in range(0, len(wire), size)]
    response = read_response(arrivals)
    assert response.status == 200
    assert [data for _, data in response.events] == events
    for arrived, data in response.events:
        assert arrived + size > wire.index(data) + len(data)


def test_read_response_of_incomplete_data() -> None:
    assert read_response([]).status == 0
    assert read_response([(0.0, b"HTTP/1.1 200 OK\r\nConte")]).status == 200
    cut = read_response([(0.0, HEAD + b"9\r\ndata: a\n\n\r\n9\r\ndata")])
    assert [data for _, data in cut.events] == [b"a"]
