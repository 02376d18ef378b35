"""Prompts that are too long: refused from their number of messages and characters, before they are rendered."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from syringa.api.chat.request import ChatRequest, prepare_chat
from syringa.api.models.served_model import FixedModels
from syringa.errors import ContextLengthExceeded
from syringa.prompt.chat.template import ChatTemplate
from tests.api.chat.helpers import HI, prompt_of, refused
from tests.chat_models import plain_model


@pytest.fixture
def no_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> str:
        raise AssertionError("rendered")

    monkeypatch.setattr(ChatTemplate, "render", fail)


@pytest.mark.usefixtures("no_rendering")
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_messages_are_refused_unread_when_there_are_more_than_tokens_in_the_context(path: str) -> None:
    messages = [*HI * 20, {"role": "none"}]
    error = await refused({"messages": messages}, path=path, model=plain_model(max_model_len=20))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "21 messages" in error["message"]


@pytest.mark.usefixtures("no_rendering")
async def test_input_items_are_refused_unread_when_there_are_more_than_tokens_in_the_context() -> None:
    body = {"input": [*HI * 20, {"role": "none"}]}
    error = await refused(body, path="/v1/responses", model=plain_model(max_model_len=20))
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "input"


async def test_text_is_refused_before_rendering_when_no_tokens_are_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = plain_model(max_model_len=1000)
    assert await prompt_of({}, model=model)  # the template has been probed
    monkeypatch.setattr(ChatTemplate, "render", None)
    error = await refused({"messages": [{"role": "user", "content": "x" * 7001}]}, model=model)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "messages"
    assert "7001 characters" in error["message"]


async def test_more_messages_than_tokens_keep_instructions_and_the_last_turns_when_truncated() -> None:
    turns = [{"role": "user", "content": str(n % 10)} for n in range(99)]
    body = {"messages": [{"role": "system", "content": "S"}, *turns], "truncate_sequence": True, "max_tokens": 5}
    assert await prompt_of(body, model=plain_model(max_model_len=30)) == "[s]S[u]5[u]6[u]7[u]8[a]"


async def test_refused_messages_are_freed_without_garbage_collection() -> None:
    class Messages(list[Any]):
        pass

    models = FixedModels([plain_model(max_model_len=1000)])
    for truncate in (False, True):
        for length in (1, 10_000):  # the first is accepted, and the template has been probed
            body = ChatRequest(messages=[], truncate_sequence=truncate)
            body.messages = Messages([{"role": "user", "content": "x" * length}])
            freed = weakref.ref(body.messages)
            gc.disable()
            try:
                if length == 1:
                    await prepare_chat(body, models, [])
                else:
                    with pytest.raises(ContextLengthExceeded):
                        await prepare_chat(body, models, [])
                del body
                assert freed() is None or length == 1
            finally:
                gc.enable()
