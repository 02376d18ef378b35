"""The history that a response continues, and its isolation between organizations."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.interface import ReadyModel
from syringa.service.responses import history
from tests.chat_models import vision_model
from tests.client import eventually
from tests.fake_engine import FakeEngine
from tests.http.responses_client import PATH, responses_client, text_of
from tests.store.helpers import read, statements, write

KEYS = ("first", "second")
IMAGE = {
    "type": "input_image",
    "image_url": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAA"
    "AAAElFTkSuQmCC",
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


async def test_previous_response_is_continued(database: str) -> None:
    async with responses_client(database) as http:
        one = await http.respond("one", instructions="be")
        two = await http.respond("two", previous_response_id=one["id"])
        assert two["previous_response_id"] == one["id"]
        assert http.prompt() == "[u]one[a]hello[u]two[a]", "instructions are not carried over"
    async with responses_client(database) as http:
        await http.stream("three", previous_response_id=two["id"])
        assert http.prompt() == "[u]one[a]hello[u]two[a]hello[u]three[a]"
        await http.respond("other", previous_response_id=one["id"])
        assert http.prompt() == "[u]one[a]hello[u]other[a]", "a chain may fork"


async def test_unknown_previous_response_is_rejected(database: str) -> None:
    async with responses_client(database) as http:
        for stream in (False, True):
            error = await http.expect_error(400, previous_response_id="resp_x", stream=stream)
            assert (error["code"], error["param"]) == ("previous_response_not_found", "previous_response_id")
            assert "resp_x" in error["message"]
        assert not http.engine.requests


async def test_deleted_link_of_a_chain_is_rejected(database: str) -> None:
    async with responses_client(database) as http:
        one = await http.respond()
        two = await http.respond(previous_response_id=one["id"])
        three = await http.respond(previous_response_id=two["id"])
        await http.delete(f"{PATH}/{two['id']}")
        error = await http.expect_error(400, previous_response_id=three["id"])
        assert error["code"] == "previous_response_not_found"
        assert two["id"] in error["message"]
        assert three["id"] in error["message"]


async def test_running_response_cannot_be_continued(file: str) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    async with responses_client(file, engine) as http:
        running = await http.respond(background=True)
        error = await http.expect_error(400, previous_response_id=running["id"])
        assert "is still" in error["message"]


async def test_incomplete_response_can_be_continued(file: str) -> None:
    async with responses_client(file) as http:
        cut = await http.respond(max_output_tokens=2)
        assert (cut["status"], text_of(cut)) == ("incomplete", "he")
        await http.respond("on", previous_response_id=cut["id"])
        assert http.prompt() == "[u]hi[a]he[u]on[a]"


async def test_previous_response_and_conversation_are_exclusive(file: str) -> None:
    async with responses_client(file) as http:
        error = await http.expect_error(400, previous_response_id="a", conversation="b")
        assert error["param"] == "previous_response_id"


async def test_responses_are_added_to_their_conversation(database: str) -> None:
    async with responses_client(database) as http:
        items = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
        conversation = (await http.post("/v1/conversations", json={"items": items})).json()["id"]
        first = await http.respond("one", conversation=conversation)
        assert first["conversation"] == {"id": conversation}
        assert http.prompt() == "[u]before[a]yes[u]one[a]"
        await http.stream("two", conversation={"id": conversation})
        assert http.prompt() == "[u]before[a]yes[u]one[a]hello[u]two[a]"
        await http.respond("three", conversation=conversation, store=False)
        listed = (await http.get(f"/v1/conversations/{conversation}/items?order=asc&limit=100")).json()["data"]
        assert [part["text"] for item in listed for part in item["content"]] == [
            *("before", "yes", "one", "hello", "two", "hello", "three", "hello")
        ]


class ColdEngine(FakeEngine):
    """An engine whose model is loaded only when the test says so."""

    def __init__(self) -> None:
        super().__init__("hello")
        self.waits, self.loaded = False, asyncio.Event()

    async def wait_ready(self, *, background: bool = False) -> ReadyModel:
        self.waits = True
        await self.loaded.wait()
        self.ready = True
        return await super().wait_ready(background=background)


async def test_history_takes_no_memory_while_a_model_is_loaded_to_count_images(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MEMORY_BYTES", 1)  # then one history of the largest size fits
    engine = ColdEngine()
    async with responses_client(file, engine, model=vision_model(), history_max_bytes=1000) as http:
        before = (await http.respond("x" * 600))["id"]
        engine.ready = False
        body = {"input": [{"role": "user", "content": [IMAGE]}], "previous_response_id": before}
        counting = asyncio.create_task(http.post(f"{PATH}/input_tokens", json=body))
        assert await eventually(lambda: engine.waits)
        other = {"input": "y", "previous_response_id": before}
        counted = await asyncio.wait_for(http.post(f"{PATH}/input_tokens", json=other), 60)
        assert counted.status_code == 200, counted.text
        assert not counting.done()
        engine.loaded.set()
        assert (await counting).status_code == 200


async def test_chain_from_a_conversation_keeps_its_earlier_items(database: str) -> None:
    async with responses_client(database) as http:
        items = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
        conversation = (await http.post("/v1/conversations", json={"items": items})).json()["id"]
        one = await http.respond("one", conversation=conversation)
        await http.respond("two", conversation=conversation)
        aside = await http.respond("aside", previous_response_id=one["id"])
        assert http.prompt() == "[u]before[a]yes[u]one[a]hello[u]aside[a]"
        await http.respond("more", previous_response_id=aside["id"])
        assert http.prompt() == "[u]before[a]yes[u]one[a]hello[u]aside[a]hello[u]more[a]"
        await http.delete(f"/v1/conversations/{conversation}")
        await http.respond("on", previous_response_id=one["id"])
        assert http.prompt() == "[u]one[a]hello[u]on[a]"


async def test_failed_response_is_not_added_to_the_conversation(file: str) -> None:
    engine = FakeEngine("hello")
    async with responses_client(file, engine) as http:
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        engine.fail = KeyError("x")
        assert (await http.stream("one", conversation=conversation))[-1]["type"] == "response.failed"
        engine.fail = None
        await http.respond("two", conversation=conversation)
        assert http.prompt() == "[u]two[a]"


@pytest.mark.parametrize("conversation", ["conv_x", {"id": "conv_x"}])
async def test_unknown_conversation_is_rejected(file: str, conversation: Any) -> None:
    async with responses_client(file) as http:
        assert (await http.expect_error(404, conversation=conversation))["param"] == "conversation"
        assert (await http.expect_error(400, conversation={}))["param"] == "conversation"


async def test_items_are_referenced_by_id(database: str) -> None:
    async with responses_client(database) as http:
        first = await http.respond("one")
        item = first["output"][0]["id"]
        await http.respond([{"type": "item_reference", "id": item}, {"role": "user", "content": "x"}])
        assert http.prompt() == "[a]hello[u]x[a]"
        error = await http.expect_error(
            404, input=[{"role": "user", "content": "x"}, {"type": "item_reference", "id": "y"}]
        )
        assert error["param"] == "input[1].id"


async def test_organizations_are_isolated(database: str) -> None:
    async with (
        responses_client(database, key="first", api_key=KEYS) as ours,
        responses_client(database, key="second", api_key=KEYS) as theirs,
    ):
        response = await ours.respond("secret")
        conversation = (await ours.post("/v1/conversations", json={"items": [{"role": "user", "content": "x"}]})).json()
        running = await ours.respond(background=True)
        items = (await ours.get(f"{PATH}/{response['id']}/input_items")).json()
        for method, path in [
            ("GET", f"{PATH}/{response['id']}"),
            ("DELETE", f"{PATH}/{response['id']}"),
            ("GET", f"{PATH}/{response['id']}/input_items"),
            ("POST", f"{PATH}/{running['id']}/cancel"),
            ("GET", f"{PATH}/{running['id']}?stream=true"),
            ("GET", f"/v1/conversations/{conversation['id']}"),
            ("GET", f"/v1/conversations/{conversation['id']}/items"),
            ("DELETE", f"/v1/conversations/{conversation['id']}"),
        ]:
            answer = await theirs.request(method, path)
            unknown = await theirs.request(method, path.replace(response["id"], "resp_x"))
            assert (answer.status_code, unknown.status_code) == (404, 404), path
        error = await theirs.expect_error(400, previous_response_id=response["id"])
        assert error["code"] == "previous_response_not_found"
        await theirs.expect_error(404, conversation=conversation["id"])
        await theirs.expect_error(404, input=[{"type": "item_reference", "id": items["first_id"]}])
        assert not theirs.engine.requests
        assert (await ours.get(f"{PATH}/{response['id']}")).status_code == 200


async def test_long_chain_is_read_with_few_queries(database: str) -> None:
    """Continue a chain of a thousand responses."""
    from syringa.service.responses.history import encode_items
    from syringa.store import StoredResponse

    count = 1000
    async with responses_client(database, max_model_len=0) as http:
        first = await http.respond("hi")
        store = http.app_state.responses.store
        previous = first["id"]
        body = (await read(store).responses.get("", previous)).body  # type: ignore[union-attr]
        for number in range(count - 1):
            id = f"resp_{number}"
            input = encode_items([{"type": "message", "id": f"m{number}", "role": "user", "content": "."}])
            output = encode_items([{"type": "message", "id": f"a{number}", "role": "assistant", "content": "-"}])
            row = StoredResponse(
                id=id, created_at=1, model="fake", status="completed", previous_id=previous, body=body,
                output=tuple(output),
            )  # fmt: skip
            await write(store).responses.create(row, input)
            previous = id
        began = time.process_time()
        with statements(store) as seen:
            body_ = {"input": "x", "previous_response_id": previous, "truncation": "auto"}
            answer = await http.post(f"{PATH}/input_tokens", json=body_)
        assert answer.status_code == 200, answer.text
        assert len([each for each in seen if "WITH RECURSIVE" in each.upper()]) == 2  # to measure it, and to load it
        assert len(seen) < 20
        await http.respond("x", previous_response_id=previous, truncation="auto", max_output_tokens=5)
        assert http.prompt().endswith("[u].[a]-[u]x[a]")
        assert time.process_time() - began < 15  # CPU time, independent of the load of the machine


async def test_many_input_items_are_paginated(database: str) -> None:
    items = [{"role": "user", "content": "x"} for _ in range(1000)]
    async with responses_client(database) as http:
        response = await http.respond(items, truncation="auto", max_output_tokens=5)
        found: list[str] = []
        after = None
        while True:
            query: dict[str, Any] = {"limit": 100, "order": "asc"} | ({"after": after} if after else {})
            page = (await http.get(f"{PATH}/{response['id']}/input_items", params=query)).json()
            found += [each["id"] for each in page["data"]]
            after = page["last_id"]
            if not page["has_more"]:
                break
        assert len(set(found)) == 1000


async def test_chain_that_is_too_large_is_refused_before_it_is_loaded(database: str) -> None:
    async with responses_client(database, history_max_bytes=1000) as http:
        first = await http.respond("x" * 300)
        second = await http.respond("y" * 300, previous_response_id=first["id"])
        with statements(http.app_state.store) as seen:
            error = await http.expect_error(400, previous_response_id=second["id"])
        assert (error["code"], error["param"]) == ("history_too_large", "previous_response_id")
        assert "exceeds this server's limit of 1000 (history_max_bytes)" in error["message"]
        assert not any("item_id" in each for each in seen)  # only measured


async def test_referenced_items_that_are_too_large_are_refused(file: str) -> None:
    async with responses_client(file, history_max_bytes=1000) as http:
        response = await http.respond("é" * 400)  # 800 bytes of UTF-8
        listed = (await http.get(f"{PATH}/{response['id']}/input_items")).json()["data"]
        other = await http.respond("x" * 300)
        listed += (await http.get(f"{PATH}/{other['id']}/input_items")).json()["data"]
        references = [{"type": "item_reference", "id": item["id"]} for item in listed]
        await http.respond(references[:1])
        error = await http.expect_error(400, input=references)
        assert (error["code"], error["param"]) == ("history_too_large", "input")
