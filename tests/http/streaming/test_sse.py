from __future__ import annotations

import asyncio
import math

import pytest

from syringa.config import Config
from syringa.errors import EngineOverloaded, EngineUnavailable
from syringa.http.streaming import sse
from tests.client import client, events, eventually, server
from tests.fake_engine import FakeEngine


async def test_stream_ends_with_done() -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert "content-length" not in answer.headers
    seen = events(answer.text)
    assert seen[-1] == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in seen[:-1]] == [*"hello", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in seen[:-1]] == [None] * 5 + ["stop"]
    assert all("usage" not in chunk for chunk in seen[:-1])


async def test_stream_includes_usage_on_request() -> None:
    body = {"prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    async with client() as http:
        seen = events((await http.post("/v1/completions", json=body)).text)
    assert all(chunk["usage"] is None for chunk in seen[:-2])
    assert seen[-2]["choices"] == []
    assert seen[-2]["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize("fault", [EngineOverloaded("full"), EngineUnavailable("gone")])
async def test_error_before_the_first_event_has_its_status(fault: Exception) -> None:
    engine = FakeEngine("hello")
    engine.fail, engine.fail_first = fault, True
    async with client(engine) as http:
        for stream in (True, False):
            answer = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("fault", "code"), [(EngineUnavailable("it died"), "engine_unavailable"), (KeyError("x"), "internal_error")]
)
async def test_error_after_the_first_event_is_the_last_event(fault: Exception, code: str) -> None:
    engine = FakeEngine("hello")
    engine.fail = fault
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.status_code == 200
    seen = events(answer.text)
    assert [len(seen), seen[-1]["error"]["code"]] == [2, code]


async def test_stream_sends_keep_alive_comments() -> None:
    engine = FakeEngine("ab", delay=0.2)
    async with client(engine, Config(keep_alive=0.05)) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.text.startswith(": waiting\n\n")
    assert events(answer.text)[-1] == "[DONE]"


async def test_error_after_a_keep_alive_comment_is_an_event() -> None:
    engine = FakeEngine("ab", delay=0.2)
    engine.output_tokens = lambda *_: 1 / 0  # type: ignore[method-assign]
    engine.deltas = _late_refusal  # type: ignore[method-assign]
    async with client(engine, Config(keep_alive=0.02)) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
    assert answer.status_code == 200
    assert events(answer.text)[-1]["error"]["code"] == "engine_overloaded"


async def _late_refusal(request: object):
    await asyncio.sleep(0.1)
    raise EngineOverloaded("full")
    yield


@pytest.mark.parametrize("stream", [True, False])
async def test_request_timeout_cancels_the_generation(stream: bool) -> None:
    engine = FakeEngine("hello", delay=0.2)
    async with client(engine, Config(request_timeout=0.05)) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "stream": stream})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "timeout")
    assert not engine.running


async def test_disconnect_during_a_stream_aborts_the_sequence() -> None:
    engine = FakeEngine("hello", delay=0.01)
    body = {"prompt": "x", "stream": True, "max_tokens": 1000, "ignore_eos": True}
    async with server(engine) as http:
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_lines():
                break
            assert engine.running
        assert await eventually(lambda: not engine.running)
        assert engine.aborted


@pytest.mark.parametrize("prompts", [["x"], ["x", "y"]])
async def test_disconnect_before_the_body_aborts_the_sequences(prompts: list[str]) -> None:
    engine = FakeEngine("hello", delay=0.01)
    body = {"prompt": prompts, "n": 2, "max_tokens": 1000, "ignore_eos": True}
    async with server(engine) as http:
        waiting = asyncio.create_task(http.post("/v1/completions", json=body))
        assert await eventually(lambda: len(engine.running) == 2 * len(prompts))
        waiting.cancel()
        assert await eventually(lambda: not engine.running)
        assert len(engine.aborted) == len(prompts)


async def test_stream_with_a_slow_start_is_complete() -> None:
    engine = FakeEngine("hello", delay=0.05)
    async with server(engine, Config(port=0, keep_alive=0.02, drain_timeout=1)) as http:
        async with http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            text = "".join([part async for part in answer.aiter_text()])
        whole = (await http.post("/v1/completions", json={"prompt": "x"})).json()
    assert ": waiting" in text
    assert "".join(each["choices"][0]["text"] for each in events(text)[:-1]) == whole["choices"][0]["text"] == "hello"


@pytest.mark.parametrize("seconds", [0.02, 1.0, 15.0])
async def test_keep_alive_timers_expire_together(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    timers = [sse._call_later_together(seconds, lambda: None) for _ in range(50)]
    took = loop.time() - began
    grain = min(0.25, seconds / 4)
    assert len({timer.when() for timer in timers}) <= 1 + math.ceil(took / grain)
    for timer in timers:
        assert began + seconds <= timer.when() <= began + took + seconds + grain
        timer.cancel()
