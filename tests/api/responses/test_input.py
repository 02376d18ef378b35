"""Tests of the `input` field."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.api.decoding import convert
from syringa.api.responses import ResponseRequest, referenced_item_ids
from syringa.api.responses.context import encrypt_reasoning, encrypt_summary
from tests.api.responses.helpers import FakeCipher, context, prepare, prompt, prompt_of, refused, respond
from tests.chat_models import plain_model, reasoning_model, tool_model, vision_model
from tests.schemas import validate_openai

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
)
ASK = {"role": "user", "content": "add"}
CALLED = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
QUERY = {"type": "custom_tool_call", "call_id": "c2", "name": "sql", "input": "select 1"}
ROWS = {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "1"}]}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


async def test_input_text_is_a_user_message() -> None:
    call = await prepare({"input": "hello"})
    assert prompt_of(call) == "[u]hello[a]"
    (item,) = call.input
    assert item == {
        "type": "message",
        "id": item["id"],
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "hello"}],
    }


async def test_input_messages_of_every_role() -> None:
    items = [
        {"role": "system", "content": "S"},
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "D"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "C", "phase": "commentary"},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "status": "incomplete",
            "content": [
                {"type": "output_text", "text": "A", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"role": "user", "content": "Q"},
    ]
    call = await prepare({"input": items})
    assert prompt_of(call) == "[s]S[s]D[u]a\nb[a]C[a]A\nno[u]Q[a]"
    assert call.input[3]["phase"] == "commentary"
    assert (call.input[4]["id"], call.input[4]["status"]) == ("msg_1", "incomplete")
    assert call.input[4]["content"][1] == {"type": "refusal", "refusal": "no"}
    assert [each["type"] for each in call.input[3]["content"]] == ["output_text"]


async def test_input_items_of_one_turn_are_one_message() -> None:
    items = [ASK, THOUGHT, {"role": "assistant", "content": "so"}, CALLED, RESULT, ASK]
    text = await prompt({"input": items}, model=tool_model())
    assert text == '[user]add[assistant]<think>hm</think>so<call>add{"a": 1}[tool:add]2#c1[user]add[assistant]'


async def test_input_later_reasoning_starts_a_new_message() -> None:
    items = [ASK, THOUGHT, CALLED, RESULT, THOUGHT, {"role": "assistant", "content": "2"}, ASK]
    text = await prompt({"input": items}, model=tool_model())
    assert text.count("[assistant]<think>hm</think>") == 2


async def test_input_parallel_calls_are_one_message() -> None:
    items = [ASK, CALLED, QUERY, ROWS, RESULT]
    text = await prompt({"input": items}, model=tool_model())
    assert text == (
        '[user]add[assistant]<call>add{"a": 1}<call>sql{"input": "select 1"}[tool:sql]1#c2[tool:add]2#c1[assistant]'
    )


async def test_input_image() -> None:
    part = {"type": "input_image", "image_url": PIXEL, "detail": "low"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "see"}, part]}]
    call = await prepare({"input": items}, model=vision_model())
    assert prompt_of(call) == "[user]see<image>[assistant]"
    assert call.request.images[0].detail == "low"
    assert call.input[0]["content"][1] == part


async def test_input_decrypts_own_reasoning_and_reports_foreign_one() -> None:
    sealed = encrypt_reasoning(FakeCipher(), "mine")
    ours = {"type": "reasoning", "summary": [], "encrypted_content": sealed}
    text = await prompt({"input": [ASK, ours, {"role": "assistant", "content": "2"}]}, model=reasoning_model())
    assert "<think>mine</think>" in text
    ignored: list[str] = []
    theirs = {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}
    call = await prepare({"input": [ASK, theirs]}, model=reasoning_model(), ignored=ignored)
    assert "<think>" not in prompt_of(call)
    assert ignored == ["input[1].encrypted_content"]
    assert call.input[1]["encrypted_content"] == "gAAAA"


async def test_input_reasoning_summary_is_used_as_reasoning() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "in short"}]}
    text = await prompt({"input": [ASK, item, {"role": "assistant", "content": "2"}]}, model=reasoning_model())
    assert "<think>in short</think>" in text


async def test_input_compaction_becomes_assistant_message() -> None:
    sealed = {"type": "compaction", "id": "cmp_1", "encrypted_content": encrypt_summary(FakeCipher(), "we agreed")}
    items = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}, sealed, ASK]
    call = await prepare({"input": items})
    assert prompt_of(call) == "[u]one\n\ntwo[a]we agreed[u]add[a]"
    assert call.input[2] == sealed


async def test_input_rejects_encrypted_reasoning_as_compaction() -> None:
    item = {"type": "compaction", "encrypted_content": encrypt_reasoning(FakeCipher(), "mine")}
    assert (await refused({"input": [item]})).param == "input[0].encrypted_content"


async def test_input_item_references() -> None:
    items = [{"type": "item_reference", "id": "msg_9"}, {"id": "msg_8"}, ASK]
    assert referenced_item_ids(convert({"input": items}, ResponseRequest)) == ["msg_9", "msg_8"]
    found = {
        "msg_9": {"type": "message", "id": "msg_9", "role": "user", "content": "nine", "status": "completed"},
        "msg_8": {"type": "message", "id": "msg_8", "role": "assistant", "content": "eight", "status": "completed"},
    }
    call = await prepare({"input": items}, request_context=context(found=found))
    assert prompt_of(call) == "[u]nine[a]eight[u]add[a]"
    assert [each["id"] for each in call.input[:2]] == ["msg_9", "msg_8"]
    missing = await refused({"input": items}, request_context=context())
    assert (missing.status, missing.param) == (404, "input[0].id")


async def test_input_follows_history_and_instructions() -> None:
    first = await prepare({"input": [ASK], "instructions": "old"}, model=tool_model())
    output = [{**CALLED, "id": "fc_1", "status": "completed"}]
    request_context = context([*first.input, *output])
    call = await prepare(
        {"input": [RESULT], "instructions": "new", "previous_response_id": "resp_1"},
        model=tool_model(),
        request_context=request_context,
    )
    assert prompt_of(call) == '[system]new[user]add[assistant]<call>add{"a": 1}[tool:add]2#c1[assistant]'
    assert [each["type"] for each in call.input] == ["function_call_output"]
    response = await respond({"previous_response_id": "resp_1", "instructions": "new"}, request_context=request_context)
    assert (response["previous_response_id"], response["instructions"]) == ("resp_1", "new")


async def test_input_instructions_are_merged_with_developer_message() -> None:
    items = [{"role": "developer", "content": "D"}, ASK]
    assert await prompt({"input": items, "instructions": "I"}) == "[s]I\n\nD[u]add[a]"


async def test_input_ignores_broken_history_items() -> None:
    history = [
        {"type": "function_call_output", "id": "fco_1", "call_id": "gone", "output": "x", "status": "completed"},
        {**CALLED, "id": "fc_1", "arguments": '{"a', "status": "incomplete"},
        {"type": "compaction", "id": "cmp_1", "encrypted_content": "foreign"},
    ]
    assert await prompt({"input": "go on"}, request_context=context(history)) == "[u]go on[a]"


async def test_input_may_be_history_only() -> None:
    history = [{"type": "message", "id": "msg_1", "role": "user", "content": "hi", "status": "completed"}]
    assert await prompt({"input": None}, request_context=context(history)) == "[u]hi[a]"


ITEMS: list[dict[str, Any]] = [
    ASK,
    {"role": "assistant", "content": "a", "phase": "final_answer"},
    {"role": "system", "content": "s"},
    CALLED,
    QUERY,
    RESULT,
    ROWS,
    THOUGHT,
    {"type": "reasoning", "summary": []},
    {"type": "compaction", "encrypted_content": encrypt_summary(FakeCipher(), "s")},
]
PREFIXES = ["msg", "msg", "msg", "fc", "ctc", "fco", "ctco", "rs", "rs", "cmp"]


async def test_input_items_are_stored_as_listed() -> None:
    call = await prepare({"input": ITEMS}, model=tool_model())
    for item in call.input:
        validate_openai(item, "ItemResource")
    assert [each["id"].partition("_")[0] for each in call.input] == PREFIXES
    again = await prepare({"input": call.input}, model=tool_model())
    assert again.input == call.input
    assert again.request.prompts == call.request.prompts


async def test_input_with_many_items() -> None:
    items = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}] * 150
    call = await prepare({"input": items}, model=plain_model())
    assert len(call.input) == 300


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_input_truncation(truncation: str) -> None:
    items = [{"role": "user", "content": "x" * 3000}, {"role": "assistant", "content": "y"}, ASK]
    body = {"input": items, "truncation": truncation, "max_output_tokens": 2000}
    if truncation == "disabled":
        error = await refused(body)
        assert (error.code, error.param) == ("context_length_exceeded", "input")
    else:
        assert await prompt(body) == "[u]add[a]"
