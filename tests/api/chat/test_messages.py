"""Tests of the `messages` field."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.api.chat.messages import read_messages
from syringa.output_formats import ModelFormats
from syringa.prompt.chat.template import ChatTemplate
from tests.api.chat.helpers import HI, post, prompt_of, send
from tests.chat_models import plain_model, reasoning_model, tool_model
from tests.fake_engine import FakeEngine

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1, "ü"]}'}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": " "}}
HISTORY = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, OTHER]},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "2"}, {"type": "text", "text": "3"}]},
]


async def read(*messages: dict[str, Any], supports_images: bool = False) -> list[dict[str, Any]]:
    ignored: list[str] = []
    read = await read_messages(list(messages), supports_images=supports_images, ignored=ignored)
    assert not ignored
    return [each.message for each in read]


async def test_read_messages_joins_text_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    no = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    assert await read(
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": no},
        {"role": "assistant", "content": None, "refusal": "Never."},
        {"role": "assistant", "content": "", "tool_calls": [], "reasoning": "hm", "audio": None},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "assistant", "reasoning": "hm"},
        {"role": "developer", "content": "d"},
    ) == [
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": "Well.\nNo."},
        {"role": "assistant", "content": "Never."},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
        {"role": "developer", "content": "d"},
    ]


async def test_read_messages_parses_calls_and_results() -> None:
    _, calling, first, second = await read(*HISTORY)
    functions = [call["function"] for call in calling["tool_calls"]]
    assert functions == [{"name": "f", "arguments": {"x": [1, "ü"]}}, {"name": "g", "arguments": {}}]
    assert calling["content"] is None
    assert first == {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "f"}
    assert second["content"] == "2\n3"


async def test_read_messages_reads_long_conversation() -> None:
    assert len(await read(*HI * 1000)) == 1000


async def test_read_messages_keeps_position_of_images() -> None:
    image = {"type": "image_url", "image_url": {"url": "http://x/1", "detail": "low"}}
    given = {"role": "user", "content": [{"type": "text", "text": "a"}, image, image]}
    (message,) = await read_messages([given], supports_images=True, ignored=[])
    assert message.message["content"] == [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "image"}]
    assert [each.param for each in message.images] == [
        f"messages[0].content[{index}].image_url.url" for index in (1, 2)
    ]
    assert message.images[0].detail == "low"


async def test_read_messages_reports_unknown_fields_by_path() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "x", "cache_control": {}}], "mood": 1, "name": "Ann"},
        {"role": "assistant", "tool_calls": [CALL | {"index": 0}], "annotations": [{}]},
    ]
    answer = await send({"messages": messages})
    assert answer.headers["x-syringa-ignored"].split(", ") == [
        "messages[0].mood",
        "messages[0].content[0].cache_control",
        "messages[1].annotations",
        "messages[1].tool_calls[0].index",
        "messages[0].name",
    ]
    answer = await send({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, model=tool_model())
    assert "x-syringa-ignored" not in answer.headers


async def test_prompt_has_names_if_template_reads_them() -> None:
    messages = [{"role": "user", "content": "x", "name": "Ann"}]
    assert await prompt_of({"messages": messages}, model=tool_model()) == "[user:Ann]x[assistant]"


async def test_prompt_of_history_with_tool_template() -> None:
    assert await prompt_of({"messages": HISTORY}, model=tool_model()) == (
        '[user]Q[assistant]<call>f{"x": [1, "ü"]}<call>g{}[tool:f]1#c1[tool:g]2\n3#c2[assistant]'
    )
    messages = [*HI, {"role": "assistant", "content": "x", "reasoning": "hm"}, *HI]
    prompt = await prompt_of({"messages": messages}, model=reasoning_model())
    assert "[assistant]<think>hm</think>x" in prompt


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
async def test_prompt_of_history_without_tool_template(tools: Any) -> None:
    prompt = await prompt_of({"messages": [*HISTORY, *HI], "tools": tools, "tool_choice": "none" if tools else None})
    assert prompt == (
        '[u]Q[a]<tool_call>{"name": "f", "arguments": {"x": [1, "ü"]}}</tool_call>\n'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
        "[u]<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n3\n</tool_response>\nhi[a]"
    )


async def test_prompt_maps_developer_to_system_unless_template_has_it() -> None:
    messages = [{"role": "developer", "content": "D"}, *HI]
    assert await prompt_of({"messages": messages}) == "[s]D[u]hi[a]"
    any_role = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert await prompt_of({"messages": messages}, model=plain_model(any_role)) == "[system]D[user]hi"
    knowing = "{% for m in messages %}[{{ 'boss' if m.role == 'developer' else m.role }}]{{ m.content }}{% endfor %}"
    assert await prompt_of({"messages": messages}, model=plain_model(knowing)) == "[boss]D[user]hi"


async def test_prompt_of_template_that_shows_calls_without_content() -> None:
    source = (
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}!{{ c.function.name }}{% endfor %}"
        "{% else %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    model = plain_model(source, formats=ModelFormats(tool_calls="deepseek", supports_tools=True))
    assert isinstance(model.template, ChatTemplate)
    assert await prompt_of({"messages": HISTORY[:2]}, model=model) == "[user]Q!f!g"


IDS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.id }} {% endfor %}{{ m.tool_call_id }} {% endfor %}"


@pytest.mark.parametrize(("format", "ids"), [("kimi", "functions.f:0 functions.g:1"), ("hermes", "c1 c2")])
async def test_prompt_has_call_ids_of_model_family(format: Any, ids: str) -> None:
    model = plain_model(IDS, formats=ModelFormats(tool_calls=format, supports_tools=True))
    assert (await prompt_of({"messages": HISTORY}, model=model)).split() == ids.split() * 2


async def test_prompt_has_nine_character_ids_for_mistral() -> None:
    model = plain_model(IDS, formats=ModelFormats(tool_calls="mistral", supports_tools=True))
    first, second, *answered = (await prompt_of({"messages": HISTORY}, model=model)).split()
    assert answered == [first, second]
    assert len(first) == len(second) == 9
    assert (first + second).isalnum()


@pytest.mark.parametrize("stream", [False, True])
async def test_messages_of_the_server_are_accepted_as_they_are(stream: bool) -> None:
    body = {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    answer = await post(body, FakeEngine("<think>hm</think>hello"), model=reasoning_model())
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "hm"
    ignored: list[str] = []
    (read_back,) = await read_messages([message], supports_images=False, ignored=ignored)
    assert read_back.message == {"role": "assistant", "content": "hello", "reasoning_content": "hm"}
    assert ignored == []
    cited = {"role": "assistant", "content": "x", "annotations": [{"type": "url_citation"}]}
    await read_messages([cited], supports_images=False, ignored=ignored)
    assert ignored == ["messages[0].annotations"]
