"""What only `/api/generate` of Ollama's API has: raw prompts, texts to fill in, templates, and contexts."""

from __future__ import annotations

from tests.chat_models import plain_model, vision_model
from tests.fake_engine import END, ByteTokenizer, FakeEngine
from tests.http.routes.ollama_requests import (
    GENERATE,
    PIXEL,
    lines,
    refused,
    send,
)


async def test_generate_applies_system_and_template() -> None:
    engine = FakeEngine("x")
    await send(GENERATE, {"system": "be brief"}, engine)
    await send(GENERATE, {"template": "<{{ messages[0].content }}>"}, engine)
    assert [bytes(each.prompt) for each in engine.requests] == [b"[s]be brief[u]hi[a]", b"<hi>"]
    assert "Go template" in await refused(GENERATE, {"template": "{{ .Prompt }}"})
    model = plain_model(request_chat_templates="refuse")
    answer = await send(GENERATE, {"template": "{{ messages }}"}, model=model)
    assert (answer.status_code, answer.json()["error"].partition(":")[0]) == (403, "template")


async def test_generate_continues_the_context_of_an_earlier_response() -> None:
    engine = FakeEngine("yes")
    first = (await send(GENERATE, {"stream": False}, engine)).json()
    assert bytes(first["context"][:-1]) == b"[u]hi[a]yes"
    assert first["context"][-1] == END
    assert lines(await send(GENERATE, {}, engine))[-1]["context"] == first["context"]
    second = await send(GENERATE, {"prompt": "and?", "context": first["context"], "stream": False}, engine)
    assert engine.requests[-1].prompt == [*first["context"], *b"[u]and?[a]"]
    assert second.json()["prompt_eval_count"] == len(engine.requests[-1].prompt)
    limited = {"context": first["context"], "options": {"num_ctx": 12}}
    await send(GENERATE, limited, engine)
    assert (len(engine.requests[-1].prompt), engine.requests[-1].stopping.max_tokens) == (11, 1)
    assert "maximum context length is 12" in await refused(GENERATE, limited | {"truncate": False})
    assert "context[0]" in await refused(GENERATE, {"context": [99999]})
    assert "vision" in await refused(GENERATE, {"context": [1]}, model=vision_model())


async def test_raw_prompt_is_sent_as_it_is_and_has_no_context() -> None:
    engine = FakeEngine("x")
    answer = await send(GENERATE, {"prompt": "[u]raw", "raw": True, "stream": False, "think": False}, engine)
    assert bytes(engine.requests[0].prompt) == b"[u]raw"
    assert engine.requests[0].stopping.max_tokens == 4096 - 6
    assert "context" not in answer.json()
    assert answer.headers["x-syringa-ignored"] == "think"
    for name, value in {"system": "s", "template": "t", "context": [1], "images": [PIXEL]}.items():
        assert (await refused(GENERATE, {"raw": True, name: value})).startswith(name)


class FillingTokenizer(ByteTokenizer):
    """A tokenizer with tokens to fill in the middle: a byte each."""

    def token_id(self, text: str) -> int | None:
        return {"<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}.get(text, super().token_id(text))


async def test_suffix_needs_a_model_that_can_fill_in() -> None:
    assert await refused(GENERATE, {"suffix": "end"}) == '"fake" does not support insert'
    engine = FakeEngine("mid")
    model = plain_model(tokenizer=FillingTokenizer())
    answer = await send(GENERATE, {"prompt": "ab", "suffix": "yz", "stream": False}, engine, model)
    assert bytes(engine.requests[0].prompt) == b"\x01ab\x02yz\x03"
    assert answer.json()["response"] == "mid"
    assert answer.json()["prompt_eval_count"] == 7
    for name, value in {"system": "s", "template": "t", "context": [1], "images": [PIXEL]}.items():
        assert (await refused(GENERATE, {"suffix": "yz", name: value}, model=model)).startswith(name)


async def test_prompt_that_a_template_leaves_empty_is_not_an_internal_error() -> None:
    for body in ({}, {"context": [104]}, {"context": [104], "options": {"num_ctx": 2}}):
        answer = await send(GENERATE, {"template": "{# nothing #}", "stream": False} | body)
        assert answer.status_code in (200, 400), answer.text
