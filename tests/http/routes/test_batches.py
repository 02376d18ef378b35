from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from syringa.config import Prices
from syringa.service.auth.keys import create_api_key
from tests.client import eventually, until
from tests.fake_engine import FakeEngine
from tests.http.batch_client import BATCHES, CHAT, FILES, BatchClient, batch_client, chat_line
from tests.store.helpers import read, write


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[BatchClient]:
    async with batch_client(tmp_path, prices=Prices(input=1e6, output=2e6), requests_per_minute=0) as http:
        yield http


async def test_batch_lifecycle(http: BatchClient) -> None:
    batch = await http.create_batch([chat_line("a"), chat_line("b")], metadata={"k": "v"})
    assert batch == {
        "id": batch["id"],
        "object": "batch",
        "endpoint": CHAT,
        "model": None,
        "errors": None,
        "input_file_id": batch["input_file_id"],
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": batch["created_at"],
        "in_progress_at": None,
        "expires_at": batch["created_at"] + 86400,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": {
            "input_tokens": 0,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 0,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 0,
        },
        "metadata": {"k": "v"},
    }
    done = await http.finished(batch["id"])
    assert (done["status"], done["request_counts"]) == ("completed", {"total": 2, "completed": 2, "failed": 0})
    assert done["in_progress_at"] <= done["finalizing_at"] <= done["completed_at"]
    assert done["model"] == "fake"
    output = await http.lines(done["output_file_id"])
    assert [each["custom_id"] for each in output] == ["a", "b"]
    response = output[0]["response"]
    assert response["status_code"] == 200
    assert response["body"]["object"] == "chat.completion"
    assert response["body"]["choices"][0]["message"]["content"] == "hello"
    usage = [each["response"]["body"]["usage"] for each in output]
    assert done["usage"]["input_tokens"] == sum(each["prompt_tokens"] for each in usage)
    listed = (await http.get(BATCHES)).json()
    assert (listed["data"], listed["first_id"], listed["has_more"]) == ([done], done["id"], False)
    assert (await http.get(FILES, params={"purpose": "batch_output"})).json()["data"][0]["bytes"] > 0


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokens": 4}, "text_completion"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 16, "store": False}, "response"),
        ("/v1/responses", {"input": "x", "max_output_tokens": 16}, "response"),
        ("/v1/embeddings", {"input": "ab", "model": "tiny"}, "list"),
    ],
)
async def test_batch_of_every_endpoint(http: BatchClient, endpoint: str, body: dict[str, Any], kind: str) -> None:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": endpoint, "body": body})
    done = await http.finished((await http.create_batch([line], endpoint))["id"])
    (output,) = await http.lines(done["output_file_id"])
    assert output["response"]["body"]["object"] == kind


async def test_refused_requests_are_in_the_error_file(http: BatchClient) -> None:
    batch = await http.create_batch([chat_line("good"), chat_line("hot", temperature=9), chat_line("x", model="none")])
    done = await http.finished(batch["id"])
    assert done["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    hot, unknown = await http.lines(done["error_file_id"])
    assert (hot["custom_id"], hot["response"]["status_code"], hot["error"]) == ("hot", 400, None)
    assert hot["response"]["body"]["error"]["param"] == "temperature"
    assert (unknown["custom_id"], unknown["response"]["status_code"]) == ("x", 404)


async def test_ignored_fields_are_named_in_the_output(http: BatchClient) -> None:
    batch = await http.create_batch([chat_line("a", color=1, prompt_cache_key="x"), chat_line("b")])
    done = await http.finished(batch["id"])
    named, plain = await http.lines(done["output_file_id"])
    assert named["response"]["ignored"] == "color, prompt_cache_key"
    assert "ignored" not in plain["response"]


async def test_lines_run_in_the_background_at_half_price_and_are_billed_once(tmp_path: Path) -> None:
    engine = FakeEngine("hello", at_once=8)
    prices = Prices(input=1e6, output=2e6)
    async with batch_client(tmp_path, engine, prices=prices, request_timeout=0.001) as http:
        done = await http.finished((await http.create_batch([chat_line(str(n)) for n in range(5)]))["id"])
        records = await read(http.app_state.store).usage.records()
    assert done["request_counts"]["completed"] == 5  # the time limit of requests does not apply
    assert all(request.background for request in engine.requests)
    assert len(records) == 5
    for record in records:
        assert (record.endpoint, record.outcome, record.first_token_seconds) == (BATCHES, "ok", None)
        full = (record.input_tokens - record.cached_tokens) + record.cached_tokens + 2 * record.output_tokens
        assert record.cost == pytest.approx(full / 2)


async def test_batches_do_not_count_against_the_rate_limits(tmp_path: Path) -> None:
    async with batch_client(tmp_path, requests_per_minute=3, tokens_per_minute=1) as http:
        done = await http.finished((await http.create_batch([chat_line(str(n)) for n in range(10)]))["id"])
        assert done["request_counts"]["completed"] == 10
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        assert (await http.post(CHAT, json=body)).status_code == 200  # the third request of the minute


async def test_file_that_is_no_batch_fails_with_errors(http: BatchClient) -> None:
    done = await http.finished((await http.create_batch([]))["id"])
    assert (done["status"], done["output_file_id"]) == ("failed", None)
    assert done["errors"] == {
        "object": "list",
        "data": [
            {
                "code": "empty_file",
                "message": "The input file is empty. Please ensure that the file contains at least one batch request.",
                "param": None,
                "line": None,
            }
        ],
    }
    bad = await http.finished((await http.create_batch(["no json"]))["id"])
    assert [(each["code"], each["line"]) for each in bad["errors"]["data"]] == [("invalid_json_line", 1)]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"input_file_id": "file-none"}, 404, "input_file_id"),
        ({"endpoint": "/v1/audio/speech"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "15d"}, 400, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, "output_expires_after.seconds"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"input_file_id": None}, 400, "input_file_id"),
    ],
)
async def test_invalid_batch_is_refused(http: BatchClient, changes: dict[str, Any], status: int, param: str) -> None:
    id = (await http.upload([chat_line("a")])).json()["id"]
    body = {"input_file_id": id, "endpoint": CHAT, "completion_window": "24h"} | changes
    refused = await http.post(BATCHES, json=body)
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["param"].startswith(param)


async def test_batch_is_not_created_for_a_deleted_file(http: BatchClient) -> None:
    id = (await http.upload([chat_line("a")])).json()["id"]
    await http.delete(f"{FILES}/{id}")
    body = {"input_file_id": id, "endpoint": CHAT, "completion_window": "24h"}
    refused = await http.post(BATCHES, json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_not_found")
    assert (await http.get(BATCHES)).json()["data"] == []


async def test_batches_are_listed_in_pages(http: BatchClient) -> None:
    file = (await http.upload([chat_line("a")])).json()["id"]
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    ids = {(await http.post(BATCHES, json=body)).json()["id"] for _ in range(3)}
    for order in ("asc", "desc"):
        page = (await http.get(BATCHES, params={"limit": 2, "order": order})).json()
        rest = (await http.get(BATCHES, params={"limit": 2, "order": order, "after": page["last_id"]})).json()
        assert {each["id"] for each in page["data"] + rest["data"]} == ids
        assert [page["has_more"], rest["has_more"]] == [True, False]
    for query, param in (({"limit": 101}, "limit"), ({"order": "up"}, "order")):
        refused = await http.get(BATCHES, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await http.get(BATCHES, params={"after": "batch_none"})).status_code == 404


async def test_output_of_a_batch_is_no_input(http: BatchClient) -> None:
    done = await http.finished((await http.create_batch([chat_line("a")]))["id"])
    body = {"input_file_id": done["output_file_id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await http.post(BATCHES, json=body)).json()["error"]["param"] == "input_file_id"


async def test_cancelled_batch_aborts_its_requests(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    async with batch_client(tmp_path, engine) as http:
        batch = await http.create_batch([chat_line("a"), chat_line("b")])
        assert await eventually(lambda: len(engine.running) == 2)
        cancelling = (await http.post(f"{BATCHES}/{batch['id']}/cancel")).json()
        assert cancelling["status"] == "cancelling"
        assert cancelling["cancelling_at"] is not None
        done = await http.finished(batch["id"])
        assert (done["status"], engine.running) == ("cancelled", set())
        assert [each["error"]["code"] for each in await http.lines(done["error_file_id"])] == ["batch_cancelled"] * 2
        again = await http.post(f"{BATCHES}/{batch['id']}/cancel")
        assert (again.status_code, again.json()["status"]) == (200, "cancelled")
        assert await read(http.app_state.store).usage.records() == []


async def test_finished_or_unknown_batch_cannot_be_cancelled(http: BatchClient) -> None:
    done = await http.finished((await http.create_batch([chat_line("a")]))["id"])
    assert (await http.post(f"{BATCHES}/{done['id']}/cancel")).status_code == 400
    for method, path in (("GET", ""), ("POST", "/cancel")):
        missing = await http.request(method, f"{BATCHES}/batch_none{path}")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "batch_not_found")


async def test_batches_of_another_organization_are_unknown(tmp_path: Path) -> None:
    async with batch_client(tmp_path, api_key=("one", "two")) as http:
        batch = await http.create_batch([chat_line("a")])
        other = {"authorization": "Bearer two"}
        assert (await http.get(f"{BATCHES}/{batch['id']}", headers=other)).status_code == 404
        assert (await http.get(BATCHES, headers=other)).json()["data"] == []
        body = {"input_file_id": batch["input_file_id"], "endpoint": CHAT, "completion_window": "24h"}
        assert (await http.post(BATCHES, json=body, headers=other)).status_code == 404
        assert (await http.finished(batch["id"]))["status"] == "completed"


async def test_restarted_server_goes_on_with_a_batch(tmp_path: Path) -> None:
    engine = FakeEngine("hello", at_once=8)
    engine.pause()
    async with batch_client(tmp_path, engine) as http:
        batch = await http.create_batch([chat_line(str(number)) for number in range(4)])
        assert await eventually(lambda: len(engine.running) == 4)
    async with batch_client(tmp_path) as http:
        done = await http.finished(batch["id"])
        assert done["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        assert len(await read(http.app_state.store).usage.records()) == 4


async def test_metrics_count_batches_and_lines(tmp_path: Path) -> None:
    engine = FakeEngine("hello", at_once=8)
    async with batch_client(tmp_path, engine) as http:
        await http.finished((await http.create_batch([chat_line("a"), chat_line("b", temperature=9)]))["id"])
        engine.pause()
        await http.create_batch([chat_line("c")])
        assert await eventually(lambda: bool(engine.running))
        text = (await http.get("/metrics")).text
        engine.resume()
    assert 'syringa_batch_lines_total{state="completed"} 1.0' in text
    assert 'syringa_batch_lines_total{state="failed"} 1.0' in text
    assert 'syringa_batches{status="in_progress"} 1.0' in text
    assert "syringa_batch_lines_waiting 1.0" in text
    # Their latency says nothing about the model.
    assert 'syringa_time_to_first_token_seconds_count{model_name="fake"} 0.0' in text


async def test_batch_ends_when_its_key_is_revoked(tmp_path: Path) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    async with batch_client(tmp_path, engine) as http:
        secrets = []
        for organization in ("acme", "other"):
            secret, key = create_api_key(organization)
            await write(http.app_state.store).keys.create(key)
            secrets.append((secret, key.id))
        await http.app_state.refresh_keys()
        http.headers["authorization"] = f"Bearer {secrets[0][0]}"
        batch = await http.create_batch([chat_line("a")])
        assert await eventually(lambda: bool(engine.running))
        await write(http.app_state.store).keys.revoke(secrets[0][1])
        await http.app_state.refresh_keys()

        async def is_cancelled() -> bool:
            found = await read(http.app_state.store).batches.get("acme", batch["id"])
            return bool(found.status == "cancelled")

        await until(is_cancelled)
        found = await read(http.app_state.store).batches.get("acme", batch["id"])
        assert json.loads(found.errors)[0]["code"] == "invalid_api_key"
        assert engine.running == set()
        assert await read(http.app_state.store).usage.records() == []
