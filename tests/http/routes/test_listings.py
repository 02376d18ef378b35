"""Lists of stored responses and conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fake_engine import FakeEngine
from tests.http.responses_client import ResponsesClient, responses_client


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


async def listed(http: httpx.AsyncClient, path: str = "/v1/responses", **query: Any) -> dict[str, Any]:
    answer = await http.get(path, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert found["object"] == "list"
    return found


async def respond_in_turn(http: ResponsesClient, *inputs: str) -> list[str]:
    """Create responses, and return their ids in the order of the list."""
    ids = [(await http.respond(each))["id"] for each in inputs]
    found = [each["id"] for each in (await listed(http, limit=100))["data"]]
    assert sorted(found) == sorted(ids)
    return found


async def test_empty_lists(file: str) -> None:
    async with responses_client(file) as http:
        for path in ("/v1/responses", "/v1/conversations"):
            assert await listed(http, path) == {
                "object": "list",
                "data": [],
                "first_id": "",
                "last_id": "",
                "has_more": False,
            }


async def test_response_is_summarized(database: str) -> None:
    async with responses_client(database, FakeEngine("Lilac.")) as http:
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        first = await http.respond("Which   shrub\nis in bloom?", metadata={"topic": "shrubs"})
        again = await http.respond("And now?", previous_response_id=first["id"])
        talk = await http.respond("Here?", conversation=conversation)
        await http.respond("Not stored.", store=False)
        found = {each["id"]: each for each in (await listed(http))["data"]}
        assert found.keys() == {first["id"], again["id"], talk["id"]}
        summary = found[first["id"]]
        assert summary.pop("expires_at") == first["created_at"] + 30 * 86400
        assert summary == {
            "id": first["id"],
            "object": "response.summary",
            "created_at": first["created_at"],
            "model": "fake",
            "status": "completed",
            "background": False,
            "previous_response_id": None,
            "conversation": None,
            "usage": first["usage"],
            "error": None,
            "incomplete_details": None,
            "metadata": {"topic": "shrubs"},
            "input_preview": "Which shrub is in bloom?",
            "output_preview": "Lilac.",
        }
        assert found[again["id"]]["previous_response_id"] == first["id"]
        assert found[talk["id"]]["conversation"] == {"id": conversation}
        continued = await listed(http, previous_response_id=first["id"])
        assert [each["id"] for each in continued["data"]] == [again["id"]]
        assert [each["id"] for each in (await listed(http, conversation=conversation))["data"]] == [talk["id"]]
        assert (await listed(http, model="other"))["data"] == []
        assert len((await listed(http, model="fake", status="completed,failed"))["data"]) == 3
        assert (await listed(http, status="failed"))["data"] == []


async def test_background_response_is_listed_while_it_runs(file: str) -> None:
    engine = FakeEngine("hello")
    engine.pause()
    async with responses_client(file, engine) as http:
        begun = await http.respond("hi", background=True)
        (found,) = (await listed(http, background="true", status="queued,in_progress"))["data"]
        assert (found["id"], found["output_preview"]) == (begun["id"], None)
        assert (await listed(http, background="false"))["data"] == []
        await http.post(f"/v1/responses/{begun['id']}/cancel")
        (found,) = (await listed(http, status="cancelled"))["data"]
        assert found["id"] == begun["id"]


async def test_pages_of_responses(file: str) -> None:
    async with responses_client(file) as http:
        ids = await respond_in_turn(http, "a", "b", "c", "d", "e")
        page = await listed(http, limit=2)
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[:2], True)
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[1])
        page = await listed(http, limit=2, after=ids[1])
        assert [each["id"] for each in page["data"]] == ids[2:4]
        page = await listed(http, limit=2, before=ids[2])
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (ids[:2], False)
        page = await listed(http, order="asc")
        assert [each["id"] for each in page["data"]] == ids[::-1]


async def test_conversations_are_listed(database: str) -> None:
    async with responses_client(database) as http:
        items = [{"role": "user", "content": "one"}]
        first = (await http.post("/v1/conversations", json={"items": items, "metadata": {"a": "b"}})).json()
        second = (await http.post("/v1/conversations", json={})).json()
        found = {each["id"]: each for each in (await listed(http, "/v1/conversations"))["data"]}
        assert found == {first["id"]: first | {"items": 1}, second["id"]: second | {"items": 0}}
        page = await listed(http, "/v1/conversations", limit=1)
        rest = await listed(http, "/v1/conversations", limit=1, after=page["last_id"])
        assert {page["first_id"], rest["first_id"]} == found.keys()
        assert (page["has_more"], rest["has_more"]) == (True, False)


async def test_organization_sees_only_its_own(database: str) -> None:
    keys = ("one", "two")
    async with responses_client(database, api_key=keys) as http:
        own: dict[str, set[str]] = {}
        for key in keys:
            http.headers["authorization"] = f"Bearer {key}"
            response = await http.respond("mine")
            conversation = (await http.post("/v1/conversations", json={})).json()
            own[key] = {response["id"], conversation["id"]}
        for key, other in (("one", "two"), ("two", "one")):
            http.headers["authorization"] = f"Bearer {key}"
            seen = {
                each["id"]
                for path in ("/v1/responses", "/v1/conversations")
                for each in (await listed(http, path))["data"]
            }
            assert seen == own[key]
            for id in own[other]:
                path = "/v1/responses" if id.startswith("resp") else "/v1/conversations"
                assert (await http.get(path, params={"after": id})).status_code == 404


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations"])
@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ({"limit": 0}, 400, "limit"),
        ({"limit": 101}, 400, "limit"),
        ({"order": "up"}, 400, "order"),
        ({"after": "x"}, 404, "after"),
        ({"before": "x\0"}, 404, "before"),
        ({"colour": "blue"}, 400, "colour"),
    ],
)
async def test_invalid_query_is_refused(file: str, path: str, query: dict[str, Any], status: int, param: str) -> None:
    async with responses_client(file) as http:
        answer = await http.get(path, params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("query", [{"status": "done"}, {"status": ""}, {"status": "failed,"}, {"background": "maybe"}])
async def test_invalid_filter_is_refused(file: str, query: dict[str, str]) -> None:
    async with responses_client(file) as http:
        answer = await http.get("/v1/responses", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))
