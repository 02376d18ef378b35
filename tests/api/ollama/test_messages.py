from __future__ import annotations

from typing import Any

import pytest

from syringa.api.ollama.messages import read_chat_messages, to_chat_messages
from syringa.errors import InvalidRequest


def call(name: str, id: str | None = None, **arguments: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}} | ({"id": id} if id else {})


def test_texts_and_thinking_are_kept() -> None:
    given = [
        {"role": "System", "content": "s"},
        {"role": "user", "content": "u", "name": "ann"},
        {"role": "assistant", "content": "a", "thinking": "t"},
        {"role": "user"},
    ]
    assert to_chat_messages(given, []) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u", "name": "ann"},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
        {"role": "user", "content": ""},
    ]


def test_images_become_data_uris() -> None:
    (message,) = to_chat_messages(
        [{"role": "user", "content": "what?", "images": ["AAAA", "data:image/gif;base64,B"]}], []
    )
    urls = [part["image_url"]["url"] for part in message["content"][1:]]
    assert urls == ["data:image/png;base64,AAAA", "data:image/gif;base64,B"]
    assert message["content"][0] == {"type": "text", "text": "what?"}


def test_results_answer_the_calls_of_their_names_in_order() -> None:
    given = [
        {"role": "assistant", "tool_calls": [call("f", a=1), call("g"), call("f", a=2), call("h", "mine")]},
        {"role": "tool", "content": "g's", "tool_name": "g"},
        {"role": "tool", "content": "first"},
        {"role": "tool", "content": "second", "name": "f"},
        {"role": "tool", "content": "by id", "tool_call_id": "mine"},
    ]
    assistant, *results = to_chat_messages(given, [])
    ids = [each["id"] for each in assistant["tool_calls"]]
    assert len(set(ids)) == 4
    assert [each["function"]["arguments"] for each in assistant["tool_calls"]] == ['{"a": 1}', "{}", '{"a": 2}', "{}"]
    assert [(each["content"], each["tool_call_id"]) for each in results] == [
        ("g's", ids[1]),
        ("first", ids[0]),
        ("second", ids[2]),
        ("by id", "mine"),
    ]


def test_generated_ids_differ_from_those_of_the_client() -> None:
    given = [
        {"role": "assistant", "tool_calls": [call("f", "call_1"), call("g"), call("h")]},
        {"role": "tool", "content": "of h", "tool_name": "h"},
        {"role": "tool", "content": "of f", "tool_call_id": "call_1"},
        {"role": "tool", "content": "of g"},
    ]
    assistant, *results = to_chat_messages(given, [])
    ids = [each["id"] for each in assistant["tool_calls"]]
    assert len(set(ids)) == 3
    assert [each["tool_call_id"] for each in results] == [ids[2], ids[0], ids[1]]


async def test_many_messages_are_read_like_a_few() -> None:
    names = [f"f{index}" for index in range(1000)]
    calls = [{"role": "assistant", "tool_calls": [call(name)]} for name in names]
    results = [{"role": "tool", "content": name, "tool_name": name} for name in reversed(names)]
    ignored: list[str] = []
    found = await read_chat_messages([*calls, *results, {"role": "user", "mood": 1}], ignored)
    ids = {each["tool_calls"][0]["function"]["name"]: each["tool_calls"][0]["id"] for each in found[:1000]}
    assert all(each["tool_call_id"] == ids[each["content"]] for each in found[1000:2000])
    assert ignored == ["messages[2000].mood"]
    with pytest.raises(InvalidRequest, match=r"messages\[2000\]"):
        await read_chat_messages([*calls, *results, {"role": "tool", "content": "of nothing"}], [])


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("x", "messages[0]"),
        ({"content": "x"}, "messages[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "images": ["https://example.com/a.png"]}, "messages[0].images[0]"),
        ({"role": "system", "content": "x", "images": ["AA"]}, "messages[0].images"),
        ({"role": "assistant", "content": "x", "images": ["AA"]}, "messages[0].images"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [call("f") | {"function": {"name": "f", "arguments": 1}}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"role": "tool", "content": "of nothing"}, "messages[0]"),
        ({"role": "tool", "content": "x", "images": ["AA"]}, "messages[0].images"),
        ({"role": "user", "images": ["AA"], "tool_calls": [call("f")]}, "messages[0].tool_calls"),
        ({"role": "user", "images": ["AA"], "thinking": "t"}, "messages[0].thinking"),
    ],
)  # fmt: skip
def test_invalid_message_is_refused_by_its_path(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        to_chat_messages([message], [])
    assert raised.value.param == param


def test_names_are_kept_and_those_of_tools_elsewhere_are_named() -> None:
    ignored: list[str] = []
    given = [
        {"role": "user", "images": ["AAAA"], "name": "ann"},
        {"role": "assistant", "content": "a", "name": "bob", "tool_name": "f", "tool_call_id": "c"},
    ]
    assert [each["name"] for each in to_chat_messages(given, ignored)] == ["ann", "bob"]
    assert ignored == ["messages[1].tool_name", "messages[1].tool_call_id"]


def test_unknown_fields_are_named() -> None:
    ignored: list[str] = []
    to_chat_messages([{"role": "user", "content": "x", "mood": 1}], ignored)
    assert ignored == ["messages[0].mood"]
