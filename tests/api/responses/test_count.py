from __future__ import annotations

from typing import Any

import pytest

from syringa.api.decoding import convert
from syringa.api.models.served_model import FixedModels
from syringa.api.responses import InputTokensRequest, count_input
from syringa.errors import InvalidRequest
from tests.api.responses.responding import context, prepared
from tests.chat_models import tool_model
from tests.schemas import validate

TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


async def counted(body: dict[str, Any], ignored: list[str] | None = None) -> dict[str, Any]:
    names = [] if ignored is None else ignored
    return await count_input(convert(body, InputTokensRequest), FixedModels([tool_model()]), names, context())


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hello"},
        {"input": [{"role": "user", "content": "x"}], "instructions": "be brief"},
        {"input": "hello", "tools": [TOOL], "tool_choice": "required"},
        {"input": "hello", "tools": [TOOL], "tool_choice": "none"},
        {"input": "hello", "chat_template_kwargs": {"enable_thinking": False}},
    ],
)
async def test_it_is_what_a_response_would_take(body: dict[str, Any]) -> None:
    count = await counted(body)
    validate(count, "TokenCountsResource")
    call = await prepared(body, model=tool_model())
    assert count["input_tokens"] == len(call.request.prompts[0])


async def test_what_is_wrong_is_named() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await counted({"input": "x", "conversation": "c", "previous_response_id": "r"})
    assert caught.value.param == "previous_response_id"
    ignored: list[str] = []
    await counted({"input": "x", "personality": "friendly"}, ignored)
    assert ignored == ["personality"]
