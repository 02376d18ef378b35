from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.http.responses_client import ResponsesClient, responses_client
from tests.schemas import validate_openai
from tests.store.helpers import statements

PATH = "/v1/conversations"
ITEMS = [{"role": "user", "content": "one"}, {"type": "message", "role": "assistant", "content": "two"}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "syringa.db")


async def created(http: ResponsesClient, **body: Any) -> dict[str, Any]:
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    validate_openai(answer.json(), "ConversationResource")
    found: dict[str, Any] = answer.json()
    return found


async def items(http: ResponsesClient, id: str, **query: Any) -> dict[str, Any]:
    answer = await http.get(f"{PATH}/{id}/items", params=query)
    assert answer.status_code == 200, answer.text
    validate_openai(answer.json(), "ConversationItemList")
    found: dict[str, Any] = answer.json()
    return found


def texts(page: dict[str, Any]) -> list[str]:
    return [part["text"] for item in page["data"] for part in item["content"]]


async def test_conversation_lifecycle(database: str) -> None:
    async with responses_client(database) as http:
        conversation = await created(http, items=ITEMS, metadata={"a": "b"})
        id = conversation["id"]
        assert (conversation["object"], conversation["metadata"]) == ("conversation", {"a": "b"})
        assert (await http.get(f"{PATH}/{id}")).json() == conversation
        changed = (await http.post(f"{PATH}/{id}", json={"metadata": {"c": "d"}})).json()
        assert changed == conversation | {"metadata": {"c": "d"}}
        assert texts(await items(http, id)) == ["two", "one"]
    async with responses_client(database) as http:
        assert (await http.get(f"{PATH}/{id}")).json() == changed
        gone = (await http.delete(f"{PATH}/{id}")).json()
        validate_openai(gone, "DeletedConversationResource")
        for method, path, body in [
            ("GET", "", None),
            ("POST", "", {"metadata": {}}),
            ("DELETE", "", None),
            ("GET", "/items", None),
            ("POST", "/items", {"items": ITEMS}),
            ("GET", "/items/x", None),
            ("DELETE", "/items/x", None),
        ]:
            answer = await http.request(method, f"{PATH}/{id}{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "conversation_not_found")


async def test_conversation_can_be_empty(file: str) -> None:
    async with responses_client(file) as http:
        conversation = await created(http)
        assert conversation["metadata"] == {}
        assert (await items(http, conversation["id"]))["data"] == []


async def test_conversation_items_can_be_added_listed_and_deleted(database: str) -> None:
    async with responses_client(database) as http:
        id = (await created(http, items=ITEMS))["id"]
        more = [{"role": "user", "content": [{"type": "input_text", "text": str(number)}]} for number in range(20)]
        added = (await http.post(f"{PATH}/{id}/items", json={"items": more})).json()
        validate_openai(added, "ConversationItemList")
        assert len(added["data"]) == 20
        first = await items(http, id, order="asc", limit=3)
        assert (texts(first), first["has_more"]) == (["one", "two", "0"], True)
        rest = await items(http, id, order="asc", limit=100, after=first["last_id"])
        assert (len(rest["data"]), rest["has_more"]) == (19, False)
        path = f"{PATH}/{id}/items/{first['first_id']}"
        one = (await http.get(path)).json()
        validate_openai(one, "ConversationItem")
        assert one == first["data"][0]
        validate_openai((await http.delete(path)).json(), "ConversationResource")
        for answer in (await http.get(path), await http.delete(path)):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "item_not_found")
        assert texts(await items(http, id, order="asc", limit=2)) == ["two", "0"]


async def test_tool_output_requires_its_call(file: str) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "42"}
    async with responses_client(file) as http:
        id = (await created(http, items=[call]))["id"]
        answer = await http.post(f"{PATH}/{id}/items", json={"items": [output]})
        assert answer.status_code == 200, answer.text
        validate_openai(await items(http, id), "ConversationItemList")
        stray = await http.post(PATH, json={"items": [output]})
        assert (stray.status_code, stray.json()["error"]["param"]) == (400, "items[0].call_id")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": "x"}, "items"),
        ({"items": [1]}, "items[0]"),
        ({"items": [{"role": "user"}]}, "items[0].content"),
        ({"items": [{"role": "user", "content": "x"}] * 21}, "items"),
        ({"items": [{"id": "a", "role": "user", "content": "x"}] * 2}, "items[1].id"),
        ({"items": [{"type": "item_reference", "id": "nowhere"}]}, "items[0].id"),
        ({"items": [{"type": "web_search_call"}]}, "items[0].type"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ],
)
async def test_invalid_conversation_is_rejected(file: str, body: dict[str, Any], param: str) -> None:
    async with responses_client(file) as http:
        answer = await http.post(PATH, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_duplicate_item_is_rejected(file: str) -> None:
    mine = [{"id": "mine", "role": "user", "content": "x"}]
    async with responses_client(file) as http:
        id = (await created(http, items=mine))["id"]
        answer = await http.post(f"{PATH}/{id}/items", json={"items": mine})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items")
        assert (await http.post(f"{PATH}/{id}/items", json={})).status_code == 400
        assert (await http.post(f"{PATH}/{id}", json={})).status_code == 200


async def test_unknown_fields_are_named(file: str) -> None:
    async with responses_client(file) as http:
        item = {"role": "user", "content": "x", "mood": "blue"}
        answer = await http.post(PATH, json={"items": [item], "what": 1})
        assert answer.headers["x-syringa-ignored"] == "what, items[0].mood"


async def test_input_item_already_in_the_conversation_is_rejected(tmp_path: Path) -> None:
    async with responses_client(str(tmp_path / "syringa.db")) as http:
        item = {"type": "message", "role": "user", "content": "one", "id": "msg_mine"}
        conversation = (await http.post("/v1/conversations", json={"items": [item]})).json()["id"]
        again = {**item, "content": "another"}
        error = await http.expect_error(400, conversation=conversation, input=[again])
        assert error["param"] == "input[0].id"


async def test_history_excludes_items_after_the_response(tmp_path: Path) -> None:
    async with responses_client(str(tmp_path / "syringa.db")) as http:
        conversation = (await http.post(PATH, json={"items": ITEMS[:1]})).json()["id"]
        first = await http.respond("first", conversation=conversation)
        await http.respond("LATER", conversation=conversation)
        await http.respond("x", previous_response_id=first["id"])
        assert "LATER" not in http.prompt()
        listed = (await http.get(f"{PATH}/{conversation}/items", params={"order": "asc"})).json()["data"]
        for item in listed[1:3]:  # those of the first response
            assert (await http.delete(f"{PATH}/{conversation}/items/{item['id']}")).status_code == 200
        await http.respond("y", previous_response_id=first["id"])
        assert "LATER" not in http.prompt()
        assert "first" in http.prompt()


@pytest.mark.parametrize(
    ("settings", "bound"),
    [({"history_max_items": 3}, "history_max_items"), ({"history_max_bytes": 750}, "history_max_bytes")],
)
async def test_conversation_size_is_bounded(database: str, settings: dict[str, Any], bound: str) -> None:
    user = {"role": "user", "content": "x" * 80}
    async with responses_client(database, **settings) as http:
        answer = await http.post(PATH, json={"items": [user] * 4})
        assert answer.status_code == 400, answer.text
        conversation = await created(http, items=[user] * 2)
        path = f"{PATH}/{conversation['id']}/items"
        answer = await http.post(path, json={"items": [user] * 2})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "history_too_large", "items")
        assert bound in error["message"]
        assert (await http.post(path, json={"items": [user]})).status_code == 200
        refused = await http.expect_error(400, conversation=conversation["id"])
        assert (refused["code"], refused["param"]) == ("history_too_large", "conversation")
        assert not http.engine.requests
        assert len((await items(http, conversation["id"]))["data"]) == 3


async def test_conversation_that_responses_have_filled_is_refused_before_it_is_loaded(file: str) -> None:
    async with responses_client(file, history_max_items=2) as http:
        conversation = await created(http, items=[{"role": "user", "content": "x"}])
        await http.respond(conversation=conversation["id"])  # its output does not fit, and is added all the same
        assert len((await items(http, conversation["id"]))["data"]) == 3
        with statements(http.app_state.store) as seen:
            answer = await http.post(f"{PATH}/{conversation['id']}/items", json={"items": ITEMS})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "history_too_large")
        assert not any("ORDER BY conversation_items.position" in each for each in seen)
