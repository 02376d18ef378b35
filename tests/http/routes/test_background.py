from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.config import Config
from syringa.errors import EngineUnavailable, StoreUnavailable
from syringa.service.responses import background, process_identity
from syringa.store import StoredEvent, StoredResponse
from tests.chat_models import plain_model, reasoning_model
from tests.client import eventually, server, settle, until
from tests.fake_engine import FakeEngine
from tests.http.responses_client import PATH, ResponsesClient, responses_client, stream_events, text_of
from tests.schemas import validate_open_responses, validate_openai
from tests.store.helpers import read, write


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


async def stored(http: ResponsesClient, id: str) -> dict[str, Any]:
    answer = await http.get(f"{PATH}/{id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def finished(http: ResponsesClient, id: str, seconds: float = 60.0) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while (found := await stored(http, id))["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    return found


async def streamed(http: ResponsesClient, id: str, after: int | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    query: dict[str, Any] = {"stream": "true"} | ({} if after is None else {"starting_after": after})
    answer = await http.get(f"{PATH}/{id}", params=query)
    assert answer.status_code == 200, answer.text
    return stream_events(answer.text, **kwargs)


async def test_background_response_is_queued_and_completes(database: str) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    async with responses_client(database, engine) as http:
        response = await http.respond(background=True)
        validate_openai(response, "Response")
        assert (response["status"], response["output"]) == ("queued", [])
        assert (await stored(http, response["id"]))["status"] in ("queued", "in_progress")
        engine.resume()
        final = await finished(http, response["id"])
        assert (final["status"], text_of(final)) == ("completed", "hello")
        validate_openai(final, "Response")


async def test_background_response_can_be_streamed_from_any_event_and_process(database: str) -> None:
    async with responses_client(database, FakeEngine("hello", delay=0.02)) as http, responses_client(database) as other:
        response = await http.respond(background=True)
        here = asyncio.create_task(streamed(http, response["id"]))
        there = asyncio.create_task(
            streamed(other, response["id"])
        )  # from the store: the response runs in another process
        whole = await here
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        for event in whole:
            validate_openai(event, "ResponseStreamEvent")
        assert [event["type"] for event in whole[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        assert whole[-1]["type"] == "response.completed"
        assert whole[-1]["response"] == await stored(other, response["id"])
        assert await there == whole
        for after in (0, 4, len(whole) - 2):
            assert await streamed(http, response["id"], after) == whole[after + 1 :]
            assert await streamed(other, response["id"], after) == whole[after + 1 :]
        assert await streamed(http, response["id"], 10_000) == []
        assert await streamed(http, response["id"], len(whole) - 1) == []


async def test_background_response_can_be_streamed_at_creation(database: str) -> None:
    async with responses_client(database) as http:
        seen = await http.stream(background=True)
        assert seen[-1]["type"] == "response.completed"
        assert await streamed(http, seen[0]["response"]["id"]) == seen
        answer = await http.get(
            f"{PATH}/{seen[0]['response']['id']}?stream=true", headers={"x-syringa-responses-mode": "open-responses"}
        )
        assert stream_events(answer.text, done=True) == seen


async def test_events_are_stored_during_generation(file: str) -> None:
    engine = FakeEngine("x", delay=0.005)
    async with responses_client(file, engine) as http:
        body: dict[str, Any] = {"ignore_eos": True, "max_output_tokens": 3000}
        response = await http.respond(background=True, **body)

        async def many_are_stored() -> bool:
            return len(await read(http.app_state.responses.store).events.after("", response["id"])) > 20

        await until(many_are_stored)
        engine.pause()
        assert (await stored(http, response["id"]))["status"] == "in_progress"


async def test_old_events_are_released_from_memory(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_RECENT_EVENTS", 10)
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.02)
    engine = FakeEngine("x", delay=0.001)
    async with responses_client(file, engine) as http:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        run = http.app_state.background.find("", response["id"])
        assert run is not None
        assert await eventually(lambda: run._first > 300 and len(run._events) < 200)
        whole = await streamed(http, response["id"])
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert len(whole) > 1000


async def test_cancel_stops_the_generation(database: str) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with responses_client(database, engine) as http:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        follower = asyncio.create_task(streamed(http, response["id"]))
        assert await eventually(lambda: engine.delivered >= 5)
        await settle()  # the follower reads them
        cancelled = (await http.post(f"{PATH}/{response['id']}/cancel")).json()
        validate_openai(cancelled, "Response")
        assert cancelled["status"] == "cancelled"
        assert text_of(cancelled).startswith("h")
        assert not engine.running
        assert await stored(http, response["id"]) == cancelled
        assert (await http.post(f"{PATH}/{response['id']}/cancel")).json() == cancelled
        assert (await follower)[-1]["type"] == "response.output_text.delta"
        await http.respond("on", previous_response_id=response["id"], max_output_tokens=1)


async def test_cancel_reaches_another_process(database: str) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with responses_client(database, engine) as http, responses_client(database) as other:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        await asyncio.sleep(0.1)
        cancelled = (await other.post(f"{PATH}/{response['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert await eventually(lambda: not engine.running)
        assert (await stored(http, response["id"]))["status"] == "cancelled"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_delete_stops_the_generation(database: str, elsewhere: bool) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with responses_client(database, engine) as http, responses_client(database) as other:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        await (other if elsewhere else http).delete(f"{PATH}/{response['id']}")
        assert await eventually(lambda: not engine.running)
        assert (await http.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_cancel_rejects_foreground_responses(file: str) -> None:
    async with responses_client(file) as http:
        response = await http.respond()
        answer = await http.post(f"{PATH}/{response['id']}/cancel")
        assert answer.status_code == 400
        assert "background" in answer.json()["error"]["message"]
        assert (await http.post(f"{PATH}/resp_x/cancel")).status_code == 404


async def test_background_requires_the_store(file: str) -> None:
    async with responses_client(file) as http:
        assert (await http.expect_error(400, background=True, store=False))["param"] == "background"


async def test_number_of_background_responses_is_limited(file: str) -> None:
    engine = FakeEngine("hello")
    async with responses_client(file, engine, max_background=2) as http:
        engine.pause()
        running = [await http.respond(background=True) for _ in range(2)]
        error = await http.expect_error(503, background=True)
        assert error["code"] == "too_many_background_responses"
        engine.resume()
        await http.respond()
        for each in running:
            await finished(http, each["id"])
        assert await eventually(lambda: not http.app_state.background._active)
        await http.respond(background=True)


async def test_background_response_holds_its_concurrency_place_until_it_ends(file: str) -> None:
    engine = FakeEngine("hello")
    async with responses_client(file, engine, key="k", api_key=("k",), concurrent_requests=2) as http:
        engine.pause()
        running = [await http.respond(background=True) for _ in range(2)]  # the client of each has its answer
        for background in (True, False):
            error = await http.expect_error(429, background=background)
            assert "2 requests at the same time" in error["message"]
        cancelled = (await http.post(f"{PATH}/{running[0]['id']}/cancel")).json()
        assert cancelled["error"]["code"] == "rate_limit_exceeded"  # a POST needs a place itself
        engine.resume()
        for each in running:
            await finished(http, each["id"])
        await http.respond(background=True)
        await http.respond()


async def test_background_response_holds_its_concurrency_place_after_its_client_disconnected(file: str) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    config = Config(port=0, drain_timeout=1.0, database=file, api_key=("k",), concurrent_requests=1)
    async with server(engine, config, plain_model()) as http:
        http.headers["authorization"] = "Bearer k"
        body = {"input": "hi", "background": True, "stream": True}
        async with http.stream("POST", PATH, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    id = msgspec.json.decode(line.removeprefix("data: "))["response"]["id"]
                    break
        assert (await http.post(PATH, json={"input": "hi"})).status_code == 429
        engine.resume()

        async def is_admitted() -> bool:
            return (await http.post(PATH, json={"input": "hi"})).status_code == 200

        async def is_completed() -> bool:
            return bool((await http.get(f"{PATH}/{id}")).json()["status"] == "completed")

        await until(is_admitted)
        await until(is_completed)  # it is stored after its place is free


async def test_cancelled_background_response_releases_its_concurrency_place(file: str) -> None:
    engine = FakeEngine("hello")
    async with responses_client(file, engine, key="k", api_key=("k",), concurrent_requests=2) as http:
        engine.pause()
        for _ in range(4):
            response = await http.respond(background=True)
            answer = await http.post(f"{PATH}/{response['id']}/cancel")
            assert answer.json()["status"] == "cancelled"


async def test_organization_cannot_take_the_background_places_of_another(file: str) -> None:
    engine = FakeEngine("hello")
    keys = ("first", "second", "third")
    async with responses_client(file, engine, key="first", api_key=keys, max_background=4) as http:
        engine.pause()
        for _ in range(4):
            await http.respond(background=True)
        assert (await http.expect_error(503, background=True))["code"] == "too_many_background_responses"
        for key, admitted in (("second", 2), ("third", 1)):  # a half and a third of four places
            http.headers["authorization"] = f"Bearer {key}"
            for _ in range(admitted):
                await http.respond(background=True)
            assert (await http.expect_error(503, background=True))["code"] == "too_many_background_responses"


async def test_engine_failure_fails_the_response(database: str) -> None:
    engine = FakeEngine("hello", delay=0.01)
    engine.fail = EngineUnavailable("it died")
    async with responses_client(database, engine) as http:
        seen = await http.stream(background=True)
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert seen[-1]["type"] == "response.failed"
        failed = await stored(http, seen[0]["response"]["id"])
        assert (failed["status"], failed["error"]["message"]) == ("failed", "it died")
        assert failed["usage"]["output_tokens"] == 1
        engine.fail_first = True
        refused = await finished(http, (await http.respond(background=True))["id"])
        assert (refused["status"], refused["usage"]["output_tokens"]) == ("failed", 0)


async def test_shutdown_fails_unfinished_responses(database: str) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with responses_client(database, engine) as http:
        quick = await http.respond(background=True)
        slow = await http.respond(background=True, ignore_eos=True, max_output_tokens=3000)
        await finished(http, quick["id"])
        await http.app_state.drain(0.5)
        assert not engine.running
    async with responses_client(database) as http:
        assert (await stored(http, quick["id"]))["status"] == "completed"
        failed = await stored(http, slow["id"])
        assert failed["status"] == "failed"
        assert "stopped" in failed["error"]["message"]
        assert failed["usage"]["output_tokens"] > 1
        assert (await streamed(http, slow["id"]))[-1]["type"] == "response.failed"


async def test_responses_of_a_dead_process_are_failed(database: str) -> None:
    """The next read fails its responses, and a stream ends with an event."""
    machine, _, started_at, token = process_identity.new_identity().split("/")
    dead = "/".join((machine, "1", str(int(started_at) + 1), token))
    async with responses_client(database) as http:
        whole = await http.respond()
        found = await read(http.app_state.responses.store).responses.get("", whole["id"])
        assert found is not None
        body = found.body.replace(whole["id"], "resp_lost").replace('"completed"', '"in_progress"')
        row = StoredResponse(
            id="resp_lost", created_at=1, model="fake", status="in_progress", background=True, body=body, process=dead
        )
        await write(http.app_state.responses.store).responses.create(row)
    async with responses_client(database) as http:
        lost = await stored(http, "resp_lost")
        assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
        validate_openai(lost, "Response")
        events = await streamed(http, "resp_lost")
        assert [event["type"] for event in events] == ["response.failed"]
        validate_openai(events[0], "ResponseStreamEvent")


async def test_cancel_during_the_final_write_is_too_late(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    write = background.ResponseRecorder._write

    async def slow_write(self: Any, *args: Any) -> None:
        begun.set()
        await go_on.wait()
        await write(self, *args)

    monkeypatch.setattr(background.ResponseRecorder, "_write", slow_write)
    async with responses_client(file, FakeEngine("hello")) as http:
        response = await http.respond(background=True)
        follower = asyncio.create_task(streamed(http, response["id"]))
        await asyncio.wait_for(begun.wait(), 30)
        cancel = asyncio.create_task(http.post(f"{PATH}/{response['id']}/cancel"))
        await asyncio.sleep(0.05)
        assert not cancel.done()
        go_on.set()
        assert (await cancel).json()["status"] == "completed"
        events = await asyncio.wait_for(follower, 30)
        assert events[-1]["type"] == "response.completed"
        assert (await stored(http, response["id"]))["status"] == "completed"


async def test_stream_of_a_dead_response_ends_with_its_failure(file: str) -> None:
    async with responses_client(file, FakeEngine("hello")) as http:
        row = StoredResponse(
            id="resp_lost", created_at=1, model="m", status="failed", background=True, body='{"status": "failed"}'
        )
        await write(http.app_state.responses.store).responses.create(row)
        for after in (None, 0, 7):
            answer = await http.get(
                f"{PATH}/resp_lost", params={"stream": "true"} | ({} if after is None else {"starting_after": after})
            )
            assert "response.failed" in answer.text, after
            assert f'"sequence_number":{0 if after is None else after + 1}' in answer.text


@pytest.mark.parametrize("written", ["openai", "open-responses"])
@pytest.mark.parametrize("read", ["openai", "open-responses"])
async def test_stream_uses_the_mode_of_its_request(file: str, written: str, read: str) -> None:
    """The text contains the field that is converted, and must not be changed."""
    text = r'''"type":"response.reasoning_text.delta" "type":"response.reasoning.delta"'''
    engine = FakeEngine(f"<think>{text}</think>hello".encode())
    async with responses_client(file, engine, model=reasoning_model(), responses_mode=written) as http:
        begun = await http.respond(background=True)
        final = await finished(http, begun["id"])
        assert final["output"][0]["content"][0]["text"] == text
        answer = await http.get(
            f"{PATH}/{begun['id']}", params={"stream": "true"}, headers={"x-syringa-responses-mode": read}
        )
    events = stream_events(answer.text, done=read == "open-responses")
    for event in events:
        if read == "openai":
            validate_openai(event, "ResponseStreamEvent")
        else:
            validate_open_responses(event, "StreamingEvent")
    name = {"openai": "reasoning_text", "open-responses": "reasoning"}[read]
    thought = [event["delta"] for event in events if event["type"] == f"response.{name}.delta"]
    assert "".join(thought) == text


@pytest.mark.parametrize("mode", ["openai", "open-responses"])
async def test_interrupted_stream_ends_with_an_error_event(
    file: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response runs in another process, and the store becomes unavailable during the stream."""
    monkeypatch.setattr(background, "POLL_SECONDS", 0.01)
    async with responses_client(file, FakeEngine("hello"), responses_mode=mode) as http:
        store = http.app_state.responses.store
        row = StoredResponse(
            id="resp_1", created_at=1, model="m", status="in_progress", background=True, body="{}", process="elsewhere"
        )
        await write(store).responses.create(row)
        event = {"type": "response.in_progress", "sequence_number": 0, "response": {}}
        await write(store).events.append("", "resp_1", [StoredEvent(0, msgspec.json.encode(event).decode())])
        events_after, reads = background._events_after, 0

        async def unavailable_soon(*arguments: Any) -> Any:
            nonlocal reads
            reads += 1
            if reads > 3:
                raise StoreUnavailable("the store is unavailable")
            return await events_after(*arguments)

        monkeypatch.setattr(background, "_events_after", unavailable_soon)
        answer = await asyncio.wait_for(http.get(f"{PATH}/resp_1", params={"stream": "true"}), 30)
    *_, error = stream_events(answer.text, done=mode == "open-responses")
    if mode == "openai":
        validate_openai(error, "ResponseErrorEvent")
        assert (error["code"], error["message"]) == ("store_unavailable", "the store is unavailable")
    else:
        validate_open_responses(error, "ErrorStreamingEvent")
        assert error["error"]["code"] == "store_unavailable"
    assert error["sequence_number"] == 0, "a client that continues after it must not miss events"


async def test_model_that_cannot_be_loaded_fails_the_response(file: str) -> None:
    engine = FakeEngine("x")
    engine.ready = False
    async with responses_client(file, engine) as http:
        begun = await http.respond(background=True)
        found = await finished(http, begun["id"])
    assert (found["status"], found["error"]["message"]) == ("failed", "The model is loading.")
