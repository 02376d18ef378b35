"""Tests of compaction."""

from __future__ import annotations

from typing import Any

from syringa.api.decoding import convert
from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.api.output_writer import PreparedRequest
from syringa.api.responses import CompactRequest, ResponseContext, prepare_compaction
from syringa.api.responses.context import decrypt_summary
from syringa.generation import generate
from syringa.output.collect import collect
from tests.api.responses.helpers import FakeCipher, context, prompt, to_json
from tests.chat_models import plain_model, reasoning_model
from tests.fake_engine import FakeEngine
from tests.schemas import validate_open_responses, validate_openai

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


async def prepare(
    body: dict[str, Any],
    model: ServedModel | None = None,
    request_context: ResponseContext | None = None,
    ignored: list[str] | None = None,
) -> PreparedRequest:
    models = FixedModels([model or plain_model()])
    names = [] if ignored is None else ignored
    return await prepare_compaction(convert(body, CompactRequest), models, names, request_context or context())


async def run_compaction(call: PreparedRequest, text: str) -> dict[str, Any]:
    seen: list[Any] = []
    await generate(FakeEngine(text), call.model.tokenizer, call.request, seen.extend)
    assert [each for event in seen for each in call.writer.write(event)] == []
    body = to_json(call.writer.render(collect(seen)))
    validate_openai(body, "CompactResource")
    validate_open_responses(body, "CompactResource")
    return body


async def test_compaction_keeps_user_messages_and_adds_summary() -> None:
    call = await prepare({"input": TALK, "instructions": "be kind"})
    text = bytes(call.request.prompts[0]).decode()
    assert text.startswith("[s]be kind[u]one[a]two[u]three\n\nSummarize")
    body = await run_compaction(call, " in short ")
    first, second, last = body["output"]
    assert [each["content"][0]["text"] for each in (first, second)] == ["one", "three"]
    assert last["type"] == "compaction"
    assert decrypt_summary(FakeCipher(), last["encrypted_content"]) == "in short"
    assert body["usage"]["output_tokens"] > 0
    assert body["object"] == "response.compaction"
    gone_on = await prompt({"input": [*body["output"], {"role": "user", "content": "and now?"}]})
    assert gone_on == "[u]one\n\nthree[a]in short[u]and now?[a]"


async def test_compaction_of_stored_conversation() -> None:
    history = [{"type": "message", "id": "msg_1", "role": "user", "content": [], "status": "completed"}]
    history[0]["content"] = [{"type": "input_text", "text": "old"}]
    call = await prepare({"previous_response_id": "resp_1"}, request_context=context(history))
    body = await run_compaction(call, "s")
    assert [each["type"] for each in body["output"]] == ["message", "compaction"]
    assert body["output"][0] == history[0]


async def test_compaction_truncates_long_conversation() -> None:
    talk = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y" * 2000}, *TALK]
    call = await prepare({"input": talk})
    assert "xxx" not in bytes(call.request.prompts[0]).decode()
    assert len((await run_compaction(call, "s"))["output"]) == 4


async def test_compaction_turns_reasoning_off() -> None:
    call = await prepare({"input": "hi"}, model=reasoning_model())
    assert bytes(call.request.prompts[0]).decode().endswith("<think></think>")


async def test_compaction_reports_ignored_fields() -> None:
    ignored: list[str] = []
    await prepare({"input": "hi", "service_tier": "flex", "prompt_cache_key": "k"}, ignored=ignored)
    assert ignored == ["prompt_cache_key", "service_tier"]
