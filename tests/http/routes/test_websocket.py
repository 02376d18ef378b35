from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.errors import EngineOverloaded, EngineUnavailable, InvalidRequest
from syringa.http import dependencies
from syringa.http.app import create_app
from syringa.http.routes import websocket as routes
from syringa.store import Store
from tests.chat_models import plain_model, reasoning_model
from tests.client import eventually, server, with_patience
from tests.fake_engine import FakeEngine
from tests.schemas import validate_open_responses, validate_openai
from tests.store.helpers import read

END = ("response.completed", "response.incomplete", "response.failed", "error")


class ResponsesSocket:
    """A client of the Responses API over a WebSocket."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    async def send(self, input: Any = "hi", **body: Any) -> None:
        await self.connection.send(json.dumps({"type": "response.create", "input": input} | body))

    async def next(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(await asyncio.wait_for(self.connection.recv(), 60))
        return found

    async def ask(self, input: Any = "hi", **body: Any) -> list[dict[str, Any]]:
        await self.send(input, **body)
        seen = [await self.next()]
        while seen[-1]["type"] not in END:
            seen.append(await self.next())
        return seen

    async def expect_error(self, text: str | bytes) -> dict[str, Any]:
        await self.connection.send(text)
        event = await self.next()
        assert event["type"] == "error"
        return event


@contextlib.asynccontextmanager
async def socket(
    tmp_path: Path,
    engine: FakeEngine | None = None,
    *,
    path: str = "/v1/responses",
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> AsyncIterator[ResponsesSocket]:
    model = settings.pop("model", None) or plain_model()
    config = Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"), **settings)
    async with server(engine or FakeEngine("hello"), config, model) as http:
        url = str(http.base_url).replace("http:", "ws:") + path
        async with connect(url, additional_headers=headers or {}, proxy=None) as connection:
            yield ResponsesSocket(connection)


async def test_websocket_serves_responses_in_sequence(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    async with socket(tmp_path, engine) as ws:
        for _ in range(3):
            seen = await ws.ask(store=False)
            for number, event in enumerate(seen):
                validate_openai(event, "ResponseStreamEvent")
                assert event["sequence_number"] == number
            assert [seen[0]["type"], seen[-1]["type"]] == ["response.created", "response.completed"]
    async with Store(str(tmp_path / "syringa.db")) as store:
        assert await read(store).responses.get("", seen[0]["response"]["id"]) is None
        assert len(await read(store).usage.records()) == 3


async def test_websocket_remembers_the_last_response(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    async with socket(tmp_path, engine) as ws:
        first = (await ws.ask("one", store=False))[-1]["response"]["id"]
        second = (await ws.ask("two", store=False, previous_response_id=first))[-1]["response"]["id"]
        await ws.ask("three", store=False, previous_response_id=second)
        assert bytes(engine.requests[-1].prompt).decode() == "[u]one[a]hello[u]two[a]hello[u]three[a]"
        error = (await ws.ask("four", store=False, previous_response_id=first))[-1]
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        assert error["error"]["param"] == "previous_response_id"


FAILURES: list[dict[str, Any]] = [
    {"temperature": 9},  # found when the message is parsed
    {"model": "other"},
    {"input": [{"type": "function_call_output", "call_id": "unknown", "output": "x"}]},
]


@pytest.mark.parametrize("wrong", FAILURES, ids=lambda body: next(iter(body)))
async def test_websocket_forgets_a_response_whose_continuation_is_refused(tmp_path: Path, wrong: dict) -> None:
    async with socket(tmp_path) as ws:
        first = (await ws.ask("one", store=False))[-1]["response"]["id"]
        refused = (await ws.ask(**({"input": "two", "store": False, "previous_response_id": first} | wrong)))[-1]
        assert refused["type"] == "error"
        error = (await ws.ask("three", store=False, previous_response_id=first))[-1]
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("fail_first", [True, False])
async def test_websocket_forgets_a_response_whose_continuation_fails(tmp_path: Path, fail_first: bool) -> None:
    engine = FakeEngine("hello")
    async with socket(tmp_path, engine) as ws:
        first = (await ws.ask("one", store=False))[-1]["response"]["id"]
        engine.fail, engine.fail_first = EngineUnavailable("it died"), fail_first
        failed = (await ws.ask("two", store=False, previous_response_id=first))[-1]
        assert failed["type"] == ("error" if fail_first else "response.failed")
        engine.fail = None
        error = (await ws.ask("three", store=False, previous_response_id=first))[-1]
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")


async def test_websocket_remembers_a_response_while_others_fail(tmp_path: Path) -> None:
    async with socket(tmp_path) as ws:
        first = (await ws.ask("one", store=False))[-1]["response"]["id"]
        assert (await ws.ask("other", temperature=9))[-1]["type"] == "error"
        assert (await ws.ask("other", previous_response_id="resp_none"))[-1]["type"] == "error"
        assert (await ws.ask("two", store=False, previous_response_id=first))[-1]["type"] == "response.completed"


async def test_websocket_reads_a_forgotten_response_that_is_stored(tmp_path: Path) -> None:
    async with socket(tmp_path) as ws:
        first = (await ws.ask("one"))[-1]["response"]["id"]
        assert (await ws.ask("two", previous_response_id=first, temperature=9))[-1]["type"] == "error"
        assert (await ws.ask("three", previous_response_id=first))[-1]["type"] == "response.completed"


async def test_stored_response_can_be_continued_on_another_connection(tmp_path: Path) -> None:
    async with socket(tmp_path) as ws:
        kept = (await ws.ask("one"))[-1]["response"]["id"]
        unkept = (await ws.ask("one", store=False))[-1]["response"]["id"]
    engine = FakeEngine("x")
    async with socket(tmp_path, engine) as ws:
        await ws.ask("two", previous_response_id=kept)
        assert bytes(engine.requests[-1].prompt).decode() == "[u]one[a]hello[u]two[a]"
        assert (await ws.ask(previous_response_id=unkept))[-1]["error"]["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        ("{", "invalid_request", None),
        ("[]", "invalid_request", None),
        ('"x"', "invalid_request", None),
        ("{}", "unknown_event_type", "type"),
        ('{"type": "session.update"}', "unknown_event_type", "type"),
        ('{"type": "response.create", "input": "x", "stream": false}', "invalid_request", "stream"),
        ('{"type": "response.create", "input": "x", "stream": "yes"}', "invalid_request", "stream"),
        ('{"type": "response.create", "input": "x", "background": false}', "invalid_request", "background"),
        ('{"type": "response.create", "input": "x", "stream_options": 1}', "invalid_request", "stream_options"),
        ('{"type": "response.create", "input": "x", "generate": 0}', "invalid_request", "generate"),
        ('{"type": "response.create", "input": [1], "generate": false}', "invalid_request", "input[0]"),
        ('{"type": "response.create", "input": "x", "temperature": 9}', "invalid_request", "temperature"),
        ('{"type": "response.create", "input": "x", "model": "other"}', "model_not_found", "model"),
        (b"\xff", "invalid_request", None),
    ],
)
async def test_invalid_message_gets_an_error_event(
    tmp_path: Path, text: str | bytes, code: str, param: str | None
) -> None:
    async with socket(tmp_path) as ws:
        event = await ws.expect_error(text)
        assert event["status"] in (400, 404)
        assert (event["error"]["code"], event["error"]["param"]) == (code, param)
        assert set(event["error"]) == {"type", "code", "message", "param"}
        assert (await ws.ask(store=False))[-1]["type"] == "response.completed", "the connection must stay usable"


@pytest.mark.parametrize(
    ("field", "value"), [("stream", True), ("stream_options", {}), ("background", True), ("generate", False)]
)
async def test_open_responses_mode_rejects_http_fields(tmp_path: Path, field: str, value: Any) -> None:
    async with socket(tmp_path, headers={"x-syringa-responses-mode": "open-responses"}) as ws:
        (error,) = await ws.ask(store=False, **{field: value})
        assert (error["status"], error["error"]["param"]) == (400, field)
        validate_open_responses(error, "WebSocketErrorEvent")


async def test_openai_mode_ignores_http_fields(tmp_path: Path) -> None:
    async with socket(tmp_path) as ws:
        seen = await ws.ask(store=False, stream=True, stream_options={"include_obfuscation": False}, generate=True)
        assert seen[-1]["type"] == "response.completed"


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("input", [[], None, "one"])
async def test_response_without_generation_can_be_continued(tmp_path: Path, store: bool, input: Any) -> None:
    """Agents send instructions and tools in advance, while the user is still typing."""
    engine = FakeEngine("hello")
    async with socket(tmp_path, engine) as ws:
        seen = await ws.ask(input, store=store, stream=True, generate=False, instructions="Be brief.")
        assert [event["type"] for event in seen] == [
            f"response.{name}" for name in ("created", "in_progress", "completed")
        ]
        for event in seen:
            validate_openai(event, "ResponseStreamEvent")
        response = seen[-1]["response"]
        assert (response["output"], response["usage"]["total_tokens"]) == ([], 0)
        assert not engine.requests
        before = f"[u]{input}" if input else ""
        await ws.ask("two", store=store, previous_response_id=response["id"], instructions="Be brief.")
        assert bytes(engine.requests[-1].prompt).decode() == f"[s]Be brief.{before}[u]two[a]"
    async with Store(str(tmp_path / "syringa.db")) as kept:
        found = await read(kept).responses.get("", response["id"])
        assert (found.status if found else None) == ("completed" if store else None)


async def test_websocket_rejects_concurrent_responses(tmp_path: Path) -> None:
    async with socket(tmp_path, FakeEngine("hello", delay=0.05)) as ws:
        await ws.send(store=False)
        assert (await ws.next())["type"] == "response.created"
        await ws.send(store=False)
        seen = [await ws.next()]
        while seen[-1]["type"] != "response.completed":
            seen.append(await ws.next())
        errors = [event for event in seen if event["type"] == "error"]
        assert [error["error"]["code"] for error in errors] == ["response_already_in_flight"]
        await ws.ask(store=False)


async def test_oversized_frame_closes_the_connection(tmp_path: Path) -> None:
    async with socket(tmp_path, max_body_bytes=1000) as ws:
        with pytest.raises(websockets.ConnectionClosed) as caught:
            await ws.ask("x" * 2000)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 1009


async def test_handshake_requires_an_api_key(tmp_path: Path) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with socket(tmp_path, headers=headers, api_key=("k",)):
                pass
        assert caught.value.response.status_code == 401
        assert json.loads(caught.value.response.body)["error"]["code"] == "invalid_api_key"
        assert caught.value.response.headers["x-request-id"]
    async with socket(tmp_path, headers={"authorization": "Bearer k"}, api_key=("k",)) as ws:
        assert (await ws.ask())[-1]["type"] == "response.completed"


async def test_handshake_rejects_other_origins(tmp_path: Path) -> None:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with socket(tmp_path, headers={"origin": "https://evil.example"}):
            pass
    assert caught.value.response.status_code == 403
    for origins in (("https://good.example",), ("*",)):
        async with socket(tmp_path, headers={"origin": "https://good.example"}, cors_origins=origins) as ws:
            await ws.ask(store=False)


@pytest.mark.parametrize("path", ["/v1/responses", "/llm/v1/responses"])
async def test_key_header_authenticates_every_message_under_a_root_path(tmp_path: Path, path: str) -> None:
    settings: dict[str, Any] = {"api_key": ("k", "other"), "root_path": "/llm"}
    async with socket(tmp_path, path=path, headers={"x-api-key": "k"}, **settings) as ws:
        events = await ws.ask(input="hi")
        assert events[-1]["type"] == "response.completed"
    for headers in ({"x-api-key": "wrong"}, {"x-api-key": "k", "authorization": "Bearer other"}):
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with socket(tmp_path, path=path, headers=headers, **settings):
                pass
        assert caught.value.response.status_code == 401


async def test_disconnect_cancels_the_response(tmp_path: Path) -> None:
    engine = FakeEngine("hello", delay=0.01)
    config = Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))
    async with server(engine, config, plain_model()) as http:
        url = str(http.base_url).replace("http:", "ws:") + "/v1/responses"
        async with connect(url, proxy=None) as connection:
            ws = ResponsesSocket(connection)
            await ws.send(ignore_eos=True, max_output_tokens=3000)
            while (event := await ws.next())["type"] != "response.output_text.delta":
                id = event.get("response", {}).get("id", "")
                if id:
                    started = id
        assert await eventually(lambda: not engine.running)
        for _ in range(3000):
            found = (await http.get(f"/v1/responses/{started}")).json()
            if found["status"] == "cancelled":
                break
            await asyncio.sleep(0.02)
        assert found["status"] == "cancelled"


async def test_failure_is_reported_and_the_connection_continues(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    async with socket(tmp_path, engine) as ws:
        engine.fail, engine.fail_first = EngineOverloaded("full"), True
        refused = (await ws.ask(store=False))[-1]
        assert (refused["status"], refused["error"]["code"]) == (503, "engine_overloaded")
        engine.fail, engine.fail_first = EngineUnavailable("died"), False
        assert (await ws.ask(store=False))[-1]["type"] == "response.failed"
        engine.fail = KeyError("secret")
        failed = (await ws.ask(store=False))[-1]
        assert failed["type"] == "response.failed"
        assert "secret" not in json.dumps(failed)
        engine.fail = None
        await ws.ask(store=False)


async def test_open_responses_mode_changes_event_names(tmp_path: Path) -> None:
    engine = FakeEngine(b"<think>hm</think>hello")
    headers = {"x-syringa-responses-mode": "open-responses"}
    async with socket(tmp_path, engine, headers=headers, model=reasoning_model()) as ws:
        assert "response.reasoning.delta" in [event["type"] for event in await ws.ask(store=False)]


async def test_idle_connection_is_closed(tmp_path: Path) -> None:
    async def check(seconds: float) -> None:
        async with socket(tmp_path, FakeEngine("hello", delay=seconds / 4), websocket_idle=seconds) as ws:
            answer = await ws.ask(store=False)
            assert answer[-1]["type"] == "response.completed", "a responding connection is not idle"
            with pytest.raises(websockets.ConnectionClosed) as caught:
                await ws.next()
            assert caught.value.rcvd is not None
            assert caught.value.rcvd.code == 1001

    await with_patience(check)


async def test_handshake_on_another_path_is_rejected(tmp_path: Path) -> None:
    config = Config(port=0, drain_timeout=1.0, database=str(tmp_path / "syringa.db"))
    async with server(FakeEngine("x"), config) as http:
        url = str(http.base_url).replace("http:", "ws:")
        with pytest.raises(websockets.InvalidStatus) as caught:
            async with connect(url + "/v1/chat/completions", proxy=None):
                pass
        assert caught.value.response.status_code in (403, 404)
        assert (await http.get("/health")).status_code == 200


async def test_websocket_refuses_to_continue_a_history_that_is_too_large(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    async with socket(tmp_path, engine, history_max_items=3) as ws:
        first = (await ws.ask("one", store=False))[-1]["response"]["id"]
        second = (await ws.ask("two", store=False, previous_response_id=first))[-1]["response"]["id"]
        error = (await ws.ask("three", store=False, previous_response_id=second))[-1]
        assert (error["status"], error["error"]["code"]) == (400, "history_too_large")
        assert "history_max_items" in error["error"]["message"]
        assert len(engine.requests) == 2


class ScriptedSocket:
    """Calls the app with a handshake and messages that have all arrived already."""

    def __init__(self, *messages: str) -> None:
        received = [{"type": "websocket.receive", "text": text} for text in messages]
        self._events: list[Any] = [{"type": "websocket.connect"}, *received, {"type": "websocket.disconnect"}]
        self.turns = 0

    async def run(self) -> None:
        async def receive() -> Any:
            return self._events.pop(0)

        async def send(message: Any) -> None:
            pass

        async def count_turns() -> None:
            while True:
                await asyncio.sleep(0)
                self.turns += 1

        app = create_app(Config(), SingleEngineProvider(FakeEngine("x")), FixedModels([plain_model()]))
        scope = {"type": "websocket", "path": "/v1/responses", "headers": [(b"host", b"localhost")], "subprotocols": []}
        counting = asyncio.create_task(count_turns())
        await app(scope, receive, send)
        counting.cancel()


async def test_websocket_yields_to_others_between_messages() -> None:
    socket = ScriptedSocket(*["{}"] * 100)
    await socket.run()
    assert socket.turns >= 100


async def test_large_websocket_message_is_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []

    def parse(text: str, open_mode: bool) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        raise InvalidRequest("x")

    monkeypatch.setattr(routes, "_parse", parse)
    await ScriptedSocket("{}", " " * (dependencies.INLINE_BYTES + 1)).run()
    assert threads == [False, True]
