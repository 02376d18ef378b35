"""Batches of `/v1/responses`: what a line stores is there once, whenever the process that runs it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from syringa.service.batches import runner
from syringa.service.batches.results import LeaseLost
from syringa.store.queries.batches import BatchQueries
from tests.client import eventually
from tests.fake_engine import FakeEngine
from tests.http.batch_client import BatchClient, batch_client

RESPONSES, CONVERSATIONS = "/v1/responses", "/v1/conversations"


def response_line(custom_id: str, **body: Any) -> str:
    given = {"input": custom_id, "max_output_tokens": 16} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": RESPONSES, "body": given})


async def stored_ids(http: BatchClient) -> list[str]:
    return [each["id"] for each in (await http.get(RESPONSES, params={"limit": 100})).json()["data"]]


async def test_line_stores_its_response_as_the_output_has_it(tmp_path: Path) -> None:
    async with batch_client(tmp_path) as http:
        lines = [response_line("a"), response_line("b", store=False)]
        done = await http.finished((await http.create_batch(lines, RESPONSES))["id"])
        first, second = [each["response"]["body"] for each in await http.lines(done["output_file_id"])]
        assert (await http.get(f"{RESPONSES}/{first['id']}")).json() == first
        (item,) = (await http.get(f"{RESPONSES}/{first['id']}/input_items")).json()["data"]
        assert item["content"][0]["text"] == "a"
        assert (await http.get(f"{RESPONSES}/{second['id']}")).status_code == 404
        answer = await http.post(RESPONSES, json={"input": "c", "previous_response_id": first["id"]})
        assert answer.json()["status"] == "completed"


@pytest.mark.parametrize("store", [True, False])
async def test_crash_before_a_result_is_stored_leaves_nothing_of_its_response(
    tmp_path: Path, store: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine("hello", at_once=8)
    add_results = BatchQueries.add_results
    crashes: list[int] = []

    def crash_once(queries: BatchQueries, *arguments: Any) -> None:
        add_results(queries, *arguments)
        if not crashes:
            crashes.append(len(engine.requests))
            raise LeaseLost  # as after a kill: the transaction is rolled back, and the lines are run again

    monkeypatch.setattr(BatchQueries, "add_results", crash_once)
    monkeypatch.setattr(runner, "RETRY_SECONDS", 0.0)
    async with batch_client(tmp_path, engine) as http:
        conversations = [(await http.post(CONVERSATIONS, json={})).json()["id"] for _ in range(3)]
        lines = [response_line(str(index), conversation=each, store=store) for index, each in enumerate(conversations)]
        engine.pause()
        created = await http.create_batch(lines, RESPONSES)
        assert await eventually(lambda: len(engine.requests) == 3)
        engine.resume()
        done = await http.finished(created["id"])
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        assert crashes == [3]
        assert len(engine.requests) == 6
        output = [each["response"]["body"] for each in await http.lines(done["output_file_id"])]
        assert sorted(await stored_ids(http)) == (sorted(each["id"] for each in output) if store else [])
        for conversation, body in zip(conversations, output, strict=True):
            items = (await http.get(f"{CONVERSATIONS}/{conversation}/items", params={"order": "asc"})).json()["data"]
            assert [item["role"] for item in items] == ["user", "assistant"]
            assert items[1]["id"] == body["output"][0]["id"]


async def test_line_that_a_stopped_server_was_running_leaves_no_cancelled_response(tmp_path: Path) -> None:
    engine = FakeEngine("hello", at_once=8)
    engine.pause()
    async with batch_client(tmp_path, engine) as http:
        batch = await http.create_batch([response_line(str(number)) for number in range(3)], RESPONSES)
        assert await eventually(lambda: len(engine.running) == 3)
        assert await stored_ids(http) == []
    async with batch_client(tmp_path) as http:
        done = await http.finished(batch["id"])
        output = await http.lines(done["output_file_id"])
        assert sorted(await stored_ids(http)) == sorted(each["response"]["body"]["id"] for each in output)


async def test_line_whose_input_has_an_item_twice_is_an_error_line(tmp_path: Path) -> None:
    """Storing it would fail, and with it the results of other lines."""
    async with batch_client(tmp_path) as http:
        first = (await http.post(RESPONSES, json={"input": "x"})).json()["output"][0]["id"]
        reference = {"type": "item_reference", "id": first}
        lines = [response_line("bad", input=[reference, reference]), response_line("good")]
        done = await http.finished((await http.create_batch(lines, RESPONSES))["id"])
        assert done["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
        (error,) = await http.lines(done["error_file_id"])
        assert "duplicate item id" in error["response"]["body"]["error"]["message"]
        assert len(await stored_ids(http)) == 2
