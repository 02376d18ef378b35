from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.errors import EngineUnavailable, StoreUnavailable
from syringa.service.responses import background, process_identity
from syringa.store import Event, StoredResponse
from tests.chat_models import thinking_model
from tests.client import eventually
from tests.fake_engine import FakeEngine
from tests.http.responding import PATH, Client, app, stream_events, text_of
from tests.schemas import validate, validate_open


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


async def stored(http: Client, id: str) -> dict[str, Any]:
    answer = await http.get(f"{PATH}/{id}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def ended(http: Client, id: str, seconds: float = 30.0) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while (found := await stored(http, id))["status"] in ("queued", "in_progress"):
        assert time.monotonic() < end
        await asyncio.sleep(0.02)
    return found


async def resumed(http: Client, id: str, after: int | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    query: dict[str, Any] = {"stream": "true"} | ({} if after is None else {"starting_after": after})
    answer = await http.get(f"{PATH}/{id}", params=query)
    assert answer.status_code == 200, answer.text
    return stream_events(answer.text, **kwargs)


async def test_it_answers_at_once_and_goes_on(database: str) -> None:
    async with app(database, FakeEngine("hello", delay=0.02)) as http:
        response = await http.respond(background=True)
        validate(response, "Response")
        assert (response["status"], response["output"]) == ("queued", [])
        assert (await stored(http, response["id"]))["status"] in ("queued", "in_progress")
        final = await ended(http, response["id"])
        assert (final["status"], text_of(final)) == ("completed", "hello")
        validate(final, "Response")


async def test_it_can_be_followed_from_anywhere(database: str) -> None:
    async with app(database, FakeEngine("hello", delay=0.02)) as http, app(database) as other:
        response = await http.respond(background=True)
        here = asyncio.create_task(resumed(http, response["id"]))
        there = asyncio.create_task(resumed(other, response["id"]))  # from the store: it runs in another process
        whole = await here
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        for event in whole:
            validate(event, "ResponseStreamEvent")
        assert [event["type"] for event in whole[:3]] == [
            "response.created",
            "response.queued",
            "response.in_progress",
        ]
        assert whole[-1]["type"] == "response.completed"
        assert whole[-1]["response"] == await stored(other, response["id"])
        assert await there == whole
        for after in (0, 4, len(whole) - 2):
            assert await resumed(http, response["id"], after) == whole[after + 1 :]
            assert await resumed(other, response["id"], after) == whole[after + 1 :]
        assert await resumed(http, response["id"], 10_000) == []
        assert await resumed(http, response["id"], len(whole) - 1) == []


async def test_a_stream_of_it(database: str) -> None:
    async with app(database) as http:
        seen = await http.stream(background=True)
        assert seen[-1]["type"] == "response.completed"
        assert await resumed(http, seen[0]["response"]["id"]) == seen
        answer = await http.get(
            f"{PATH}/{seen[0]['response']['id']}?stream=true", headers={"x-syringa-responses-mode": "open-responses"}
        )
        assert stream_events(answer.text, done=True) == seen


async def test_events_are_stored_while_it_runs(file: str) -> None:
    engine = FakeEngine("x", delay=0.005)
    async with app(file, engine) as http:
        body: dict[str, Any] = {"ignore_eos": True, "max_output_tokens": 1000}
        response = await http.respond(background=True, **body)
        begun = time.monotonic()
        await asyncio.sleep(1.2)
        there = await http.work.state.store.events_after("", response["id"])
        late = background.FLUSH_SECONDS + 0.5
        assert len(there) > 20 * (time.monotonic() - begun - late)
        assert (await stored(http, response["id"]))["status"] == "in_progress"


async def test_old_events_leave_the_memory(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "RECENT", 10)
    monkeypatch.setattr(background, "FLUSH_SECONDS", 0.02)
    engine = FakeEngine("x", delay=0.001)
    async with app(file, engine) as http:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        run = http.work.background.find("", response["id"])
        assert run is not None
        assert await eventually(lambda: run._first > 300 and len(run._events) < 200)
        whole = await resumed(http, response["id"])
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert len(whole) > 1000


async def test_cancel(database: str) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with app(database, engine) as http:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        follower = asyncio.create_task(resumed(http, response["id"]))
        assert await eventually(lambda: engine.running)
        await asyncio.sleep(0.2)
        cancelled = (await http.post(f"{PATH}/{response['id']}/cancel")).json()
        validate(cancelled, "Response")
        assert cancelled["status"] == "cancelled"
        assert text_of(cancelled).startswith("h")
        assert not engine.running
        assert await stored(http, response["id"]) == cancelled
        assert (await http.post(f"{PATH}/{response['id']}/cancel")).json() == cancelled
        assert (await follower)[-1]["type"] == "response.output_text.delta"
        await http.respond("on", previous_response_id=response["id"], max_output_tokens=1)


async def test_cancel_by_another_process(database: str) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with app(database, engine) as http, app(database) as other:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        await asyncio.sleep(0.1)
        cancelled = (await other.post(f"{PATH}/{response['id']}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert await eventually(lambda: not engine.running)
        assert (await stored(http, response["id"]))["status"] == "cancelled"


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_deleting_it_ends_it(database: str, elsewhere: bool) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with app(database, engine) as http, app(database) as other:
        response = await http.respond(background=True, ignore_eos=True, max_output_tokens=1000)
        await (other if elsewhere else http).delete(f"{PATH}/{response['id']}")
        assert await eventually(lambda: not engine.running)
        assert (await http.get(f"{PATH}/{response['id']}")).status_code == 404


async def test_only_background_responses_are_cancelled(file: str) -> None:
    async with app(file) as http:
        response = await http.respond()
        answer = await http.post(f"{PATH}/{response['id']}/cancel")
        assert answer.status_code == 400
        assert "background" in answer.json()["error"]["message"]
        assert (await http.post(f"{PATH}/resp_x/cancel")).status_code == 404


async def test_it_needs_the_store(file: str) -> None:
    async with app(file) as http:
        assert (await http.refuse(400, background=True, store=False))["param"] == "background"


async def test_there_is_a_limit(file: str) -> None:
    engine = FakeEngine("hello", delay=0.05)
    async with app(file, engine, max_background=2) as http:
        running = [await http.respond(background=True) for _ in range(2)]
        error = await http.refuse(503, background=True)
        assert error["code"] == "too_many_background_responses"
        await http.respond()
        for each in running:
            await ended(http, each["id"])
        assert await eventually(lambda: not http.work.background._runs)
        await http.respond(background=True)


async def test_an_engine_that_fails(database: str) -> None:
    engine = FakeEngine("hello", delay=0.01)
    engine.fail = EngineUnavailable("it died")
    async with app(database, engine) as http:
        seen = await http.stream(background=True)
        assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
        assert seen[-1]["type"] == "response.failed"
        failed = await stored(http, seen[0]["response"]["id"])
        assert (failed["status"], failed["error"]["message"]) == ("failed", "it died")
        assert failed["usage"]["output_tokens"] == 1
        engine.fail_first = True
        refused = await ended(http, (await http.respond(background=True))["id"])
        assert (refused["status"], refused["usage"]["output_tokens"]) == ("failed", 0)


async def test_a_server_that_ends(database: str) -> None:
    engine = FakeEngine("hello", delay=0.02)
    async with app(database, engine) as http:
        quick = await http.respond(background=True)
        slow = await http.respond(background=True, ignore_eos=True, max_output_tokens=3000)
        await http.work.drain(3)
        assert not engine.running
    async with app(database) as http:
        assert (await stored(http, quick["id"]))["status"] == "completed"
        failed = await stored(http, slow["id"])
        assert failed["status"] == "failed"
        assert "stopped" in failed["error"]["message"]
        assert failed["usage"]["output_tokens"] > 1
        assert (await resumed(http, slow["id"]))[-1]["type"] == "response.failed"


async def test_a_server_that_died(database: str) -> None:
    """Its responses are failed for whoever asks, at once; a follower is told by an event."""
    machine, _, began, token = process_identity.name().split("/")
    dead = "/".join((machine, "1", str(int(began) + 1), token))
    async with app(database) as http:
        whole = await http.respond()
        found = await http.work.state.store.get_response("", whole["id"])
        assert found is not None
        body = found.body.replace(whole["id"], "resp_lost").replace('"completed"', '"in_progress"')
        row = StoredResponse(
            id="resp_lost", created_at=1, model="fake", status="in_progress", background=True, body=body, owner=dead
        )
        await http.work.state.store.create_response(row)
    async with app(database) as http:
        lost = await stored(http, "resp_lost")
        assert (lost["status"], lost["error"]["code"]) == ("failed", "server_error")
        validate(lost, "Response")
        events = await resumed(http, "resp_lost")
        assert [event["type"] for event in events] == ["response.failed"]
        validate(events[0], "ResponseStreamEvent")


async def test_a_cancel_during_the_last_write_comes_too_late(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    write = background.Record._write

    async def slowly(self: Any, *args: Any) -> None:
        begun.set()
        await go_on.wait()
        await write(self, *args)

    monkeypatch.setattr(background.Record, "_write", slowly)
    async with app(file, FakeEngine("hello")) as http:
        response = await http.respond(background=True)
        follower = asyncio.create_task(resumed(http, response["id"]))
        await asyncio.wait_for(begun.wait(), 30)
        cancel = asyncio.create_task(http.post(f"{PATH}/{response['id']}/cancel"))
        await asyncio.sleep(0.05)
        assert not cancel.done()
        go_on.set()
        assert (await cancel).json()["status"] == "completed"
        events = await asyncio.wait_for(follower, 30)
        assert events[-1]["type"] == "response.completed"
        assert (await stored(http, response["id"]))["status"] == "completed"


async def test_a_follower_ahead_of_what_was_stored_hears_of_the_end(file: str) -> None:
    async with app(file, FakeEngine("hello")) as http:
        row = StoredResponse(
            id="resp_lost", created_at=1, model="m", status="failed", background=True, body='{"status": "failed"}'
        )
        await http.work.state.store.create_response(row)
        for after in (None, 0, 7):
            answer = await http.get(
                f"{PATH}/resp_lost", params={"stream": "true"} | ({} if after is None else {"starting_after": after})
            )
            assert "response.failed" in answer.text, after
            assert f'"sequence_number":{0 if after is None else after + 1}' in answer.text


@pytest.mark.parametrize("written", ["openai", "open-responses"])
@pytest.mark.parametrize("read", ["openai", "open-responses"])
async def test_it_is_followed_in_the_mode_of_who_follows(file: str, written: str, read: str) -> None:
    """Its text spells out the very field that is changed, where it must stay as it is."""
    said = r'''"type":"response.reasoning_text.delta" "type":"response.reasoning.delta"'''
    engine = FakeEngine(f"<think>{said}</think>hello".encode())
    async with app(file, engine, model=thinking_model(), responses_mode=written) as http:
        begun = await http.respond(background=True)
        final = await ended(http, begun["id"])
        assert final["output"][0]["content"][0]["text"] == said
        answer = await http.get(
            f"{PATH}/{begun['id']}", params={"stream": "true"}, headers={"x-syringa-responses-mode": read}
        )
    events = stream_events(answer.text, done=read == "open-responses")
    for event in events:
        if read == "openai":
            validate(event, "ResponseStreamEvent")
        else:
            validate_open(event, "StreamingEvent")
    name = {"openai": "reasoning_text", "open-responses": "reasoning"}[read]
    thought = [event["delta"] for event in events if event["type"] == f"response.{name}.delta"]
    assert "".join(thought) == said


@pytest.mark.parametrize("mode", ["openai", "open-responses"])
async def test_a_stream_that_cannot_go_on_says_so_in_its_mode(
    file: str, mode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The response is another process's, and the store goes away while it is followed."""
    monkeypatch.setattr(background, "POLL_SECONDS", 0.01)
    async with app(file, FakeEngine("hello"), responses_mode=mode) as http:
        store = http.work.state.store
        row = StoredResponse(
            id="resp_1", created_at=1, model="m", status="in_progress", background=True, body="{}", owner="elsewhere"
        )
        await store.create_response(row)
        event = {"type": "response.in_progress", "sequence_number": 0, "response": {}}
        await store.append_events("", "resp_1", [Event(0, msgspec.json.encode(event).decode())])
        look, looks = type(store).events_after, 0

        async def away_soon(*arguments: Any, **named: Any) -> Any:
            nonlocal looks
            looks += 1
            if looks > 3:
                raise StoreUnavailable("nothing can be looked up")
            return await look(*arguments, **named)

        monkeypatch.setattr(type(store), "events_after", away_soon)
        answer = await asyncio.wait_for(http.get(f"{PATH}/resp_1", params={"stream": "true"}), 30)
    *_, error = stream_events(answer.text, done=mode == "open-responses")
    if mode == "openai":
        validate(error, "ResponseErrorEvent")
        assert (error["code"], error["message"]) == ("store_unavailable", "nothing can be looked up")
    else:
        validate_open(error, "ErrorStreamingEvent")
        assert error["error"]["code"] == "store_unavailable"
    assert error["sequence_number"] == 0, "who goes on after it misses nothing"


async def test_a_model_that_cannot_be_loaded_is_told_of(file: str) -> None:
    engine = FakeEngine("x")
    engine.ready = False
    async with app(file, engine) as http:
        begun = await http.respond(background=True)
        found = await ended(http, begun["id"])
    assert (found["status"], found["error"]["message"]) == ("failed", "The model is loading.")
