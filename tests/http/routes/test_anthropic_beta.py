"""`/v1/messages` with blocks and fields of beta features: honored, or named in `x-syringa-ignored`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chat_models import reasoning_model, tool_model
from tests.fake_engine import FakeEngine
from tests.http.anthropic_client import ASKED, TOOL, anthropic_client

OTHER = TOOL | {"name": "get_time", "description": "Return the time."}
ADDED = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "get_time"}}
DEFINED = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": OTHER}}
REMOVED = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_time"}}


def change(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks)}


@pytest.mark.parametrize(
    ("tools", "changes", "offered"),
    [
        ([TOOL, OTHER], [REMOVED], ["get_weather"]),
        ([TOOL, OTHER], [REMOVED, ADDED], ["get_weather", "get_time"]),
        ([TOOL, OTHER | {"defer_loading": True}], [], ["get_weather"]),
        ([TOOL, OTHER | {"defer_loading": True}], [ADDED], ["get_weather", "get_time"]),
        ([TOOL], [DEFINED], ["get_weather", "get_time"]),
        ([TOOL], [DEFINED, REMOVED], ["get_weather"]),
        (None, [DEFINED], ["get_time"]),
        ([OTHER], [REMOVED], []),
    ],
)
async def test_changes_of_the_tools_in_messages_are_honored(
    tools: list[Any] | None, changes: list[Any], offered: list[str]
) -> None:
    messages = [*ASKED, *(change(each) for each in changes)]
    async with anthropic_client(model=tool_model()) as http:
        assert await http.ignored(tools=tools, messages=messages) == [""]
        prompt = http.prompt()
        assert [name for name in ("get_weather", "get_time") if f'"name": "{name}"' in prompt] == offered
        assert prompt.endswith("[user]hi[assistant]")  # without an empty system message
        assert await http.count(tools=tools, messages=messages) == len(prompt)


async def test_tool_that_was_withdrawn_cannot_be_chosen() -> None:
    choice = {"type": "tool", "name": "get_time"}
    async with anthropic_client(model=tool_model()) as http:
        error = await http.error(400, tools=[TOOL, OTHER], messages=[*ASKED, change(REMOVED)], tool_choice=choice)
        assert error["message"] == "tool_choice.name: no tool 'get_time' is offered to the model (get_weather)."


async def test_changes_of_tools_that_the_server_does_not_have_are_named() -> None:
    mcp = {"type": "mcp_tool_reference", "server_name": "s", "name": "n"}
    toolset = {"type": "mcp_toolset_reference", "server_name": "s"}
    hosted = {"type": "tool_definition", "definition": {"type": "web_search_20250305", "name": "web_search"}}
    content = change(
        {"type": "tool_addition", "tool": mcp},
        {"type": "tool_removal", "tool": toolset},
        {"type": "tool_addition", "tool": hosted},
        ADDED,
        {"type": "text", "text": "Go on."},
    )
    async with anthropic_client(model=tool_model()) as http:
        assert await http.ignored(tools=[TOOL], messages=[*ASKED, content]) == [
            "messages[1].content[0] (tool_addition)",
            "messages[1].content[1] (tool_removal)",
            "messages[1].content[2].tool.definition (web_search_20250305)",
            "messages[1].content[3] (tool_addition)",
        ]
        assert http.prompt().endswith("[user]hi[system]Go on.[assistant]")
    async with anthropic_client(model=tool_model(unsupported_tools="refuse")) as http:
        error = await http.error(400, messages=[*ASKED, content])
        assert error["message"].startswith("messages[1].content[2].tool.definition.type: this server has no web_search")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "tool_addition"}, "messages[1].content[0].tool: expected an object."),
        (
            {"type": "tool_removal", "tool": {"type": "tool_definition", "definition": OTHER}},
            "messages[1].content[0].tool.type: expected one of tool_reference, mcp_tool_reference,"
            " mcp_toolset_reference.",
        ),
        (
            {"type": "tool_addition", "tool": {"type": "tool_definition"}},
            "messages[1].content[0].tool.definition: required.",
        ),
        ({"type": "compaction", "signature": {}}, "messages[1].content[0].signature: expected str, got object."),
        (
            {"type": "compaction", "tool_changes": [ADDED | {"cache_control": {}}]},
            "messages[1].content[0].tool_changes[0].cache_control: object missing required field type.",
        ),
        (
            {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": {"name": "x"}}},
            "messages[1].content[0].tool.definition: object missing required field input_schema.",
        ),
        (
            {"type": "compaction", "tool_changes": [{"type": "text", "text": ""}]},
            "messages[1].content[0].tool_changes[0].type: supported blocks of compaction messages are tool_addition,"
            " tool_removal, not 'text'.",
        ),
    ],
)
async def test_wrong_changes_of_tools_are_refused(block: dict[str, Any], message: str) -> None:
    async with anthropic_client(model=tool_model()) as http:
        assert (await http.error(400, messages=[*ASKED, change(block)]))["message"] == message


async def test_summary_of_a_compaction_is_in_the_prompt() -> None:
    summary = {"type": "compaction", "content": "Lilac.", "signature": "x", "tool_changes": [DEFINED]}
    failed = {"type": "compaction", "content": None, "encrypted_content": "x"}
    listing = {"type": "mcp_tool_listing", "mcp_server_name": "s", "tools": []}
    messages = [{"role": "assistant", "content": [summary, failed, listing, {"type": "text", "text": "Ok."}]}, *ASKED]
    async with anthropic_client(model=tool_model()) as http:
        assert await http.ignored(messages=messages) == [
            "messages[0].content[1] (compaction)",
            "messages[0].content[2] (mcp_tool_listing)",
        ]
        assert '"name": "get_time"' in http.prompt()
        assert http.prompt().endswith("[assistant]Summary of the conversation before:\nLilac.\nOk.[user]hi[assistant]")


async def test_effort_of_a_system_message_is_named() -> None:
    config = {"role": "system", "content": [], "output_config": {"effort": "low"}}
    async with anthropic_client() as http:
        assert await http.ignored(messages=[*ASKED, config]) == ["messages[1].output_config"]
        assert http.prompt() == "[u]hi[a]"
        assert await http.ignored(messages=[*ASKED, config | {"content": ""}]) == ["messages[1].output_config"]
        assert http.prompt() == "[u]hi[a]"
        error = await http.error(400, messages=[*ASKED, config | {"output_config": {}}])
        assert "only the last message of the assistant may be empty" in error["message"]


async def test_thinking_display_updates_is_named() -> None:
    engine = FakeEngine("<think>Let me see.</think>Yes.")
    async with anthropic_client(engine, model=reasoning_model()) as http:
        answer = await http.send_body(thinking={"type": "adaptive", "display": "updates"})
        assert answer.headers["x-syringa-ignored"] == "thinking.display"
        assert answer.json()["content"][0]["thinking"] == "Let me see."
