from __future__ import annotations

from typing import Any

from syringa.api.decoding import Call, convert
from syringa.api.models.served_model import FixedModels, ServedModel
from syringa.api.responses import CompactRequest, Context, prepare_compaction
from syringa.api.responses.sealing import open_summary
from syringa.generation import generate
from syringa.output.collect import collect
from tests.api.responses.responding import FakeSeal, context, plain, prompt
from tests.chat_models import plain_model, thinking_model
from tests.fake_engine import FakeEngine
from tests.schemas import validate, validate_open

TALK = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "three"},
]


async def prepared(
    body: dict[str, Any],
    model: ServedModel | None = None,
    around: Context | None = None,
    ignored: list[str] | None = None,
) -> Call:
    models = FixedModels([model or plain_model()])
    names = [] if ignored is None else ignored
    return await prepare_compaction(convert(body, CompactRequest), models, names, around or context())


async def compacted(call: Call, text: str) -> dict[str, Any]:
    seen: list[Any] = []
    await generate(FakeEngine(text), call.model.tokenizer, call.request, seen.extend)
    assert [each for event in seen for each in call.writer.write(event)] == []
    body = plain(call.writer.render(collect(seen)))
    validate(body, "CompactResource")
    validate_open(body, "CompactResource")
    return body


async def test_what_the_user_said_stays_and_the_rest_is_a_summary() -> None:
    call = await prepared({"input": TALK, "instructions": "be kind"})
    text = bytes(call.request.prompts[0]).decode()
    assert text.startswith("[s]be kind[u]one[a]two[u]three\n\nSummarize")
    body = await compacted(call, " in short ")
    first, second, last = body["output"]
    assert [each["content"][0]["text"] for each in (first, second)] == ["one", "three"]
    assert last["type"] == "compaction"
    assert open_summary(FakeSeal(), last["encrypted_content"]) == "in short"
    assert body["usage"]["output_tokens"] > 0
    assert body["object"] == "response.compaction"
    gone_on = await prompt({"input": [*body["output"], {"role": "user", "content": "and now?"}]})
    assert gone_on == "[u]one\n\nthree[a]in short[u]and now?[a]"


async def test_a_stored_conversation_is_compacted() -> None:
    history = [{"type": "message", "id": "msg_1", "role": "user", "content": [], "status": "completed"}]
    history[0]["content"] = [{"type": "input_text", "text": "old"}]
    call = await prepared({"previous_response_id": "resp_1"}, around=context(history))
    body = await compacted(call, "s")
    assert [each["type"] for each in body["output"]] == ["message", "compaction"]
    assert body["output"][0] == history[0]


async def test_a_long_conversation_is_cut_to_fit() -> None:
    talk = [{"role": "user", "content": "x" * 2000}, {"role": "assistant", "content": "y" * 2000}, *TALK]
    call = await prepared({"input": talk})
    assert "xxx" not in bytes(call.request.prompts[0]).decode()
    assert len((await compacted(call, "s"))["output"]) == 4


async def test_no_thought_is_spent_on_it() -> None:
    call = await prepared({"input": "hi"}, model=thinking_model())
    assert bytes(call.request.prompts[0]).decode().endswith("<think></think>")


async def test_what_is_not_heeded_is_named() -> None:
    ignored: list[str] = []
    await prepared({"input": "hi", "service_tier": "flex", "prompt_cache_key": "k"}, ignored=ignored)
    assert ignored == ["prompt_cache_key", "service_tier"]
