"""`POST /v1/responses/input_tokens`: how long the prompt of a response would be."""

from __future__ import annotations

from typing import Any

from syringa.api.models.served_model import Models
from syringa.api.responses.context import Context
from syringa.api.responses.lowering import lower, read_reasoning
from syringa.api.responses.prepare import check_conversation
from syringa.api.responses.request import InputTokensRequest
from syringa.api.responses.text import read_text
from syringa.api.responses.tools import read_tools


async def count_input(body: InputTokensRequest, models: Models, ignored: list[str], context: Context) -> dict[str, Any]:
    """The tokens of the prompt, which is rendered as for a response. An image counts as its placeholder alone: how
    many tokens it takes is known to the engine, which has not seen it."""
    model = await models.find(body.model)
    check_conversation(body)
    if body.personality is not None:
        ignored.append("personality")
    await read_text(body.text, ignored, open_mode=context.open_mode)
    tools = await read_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False,
        hold=model.dialect.calls == "plain",
        open_mode=context.open_mode,
    )
    thoughts, _ = read_reasoning(
        body.reasoning, body.chat_template_kwargs, None, model, ignored, open_mode=context.open_mode
    )
    lowered = await lower(
        body,
        model,
        context,
        ignored,
        tools=tools.request.use if tools.request is not None else None,
        thoughts=thoughts,
        truncate=body.truncation == "auto",
    )
    return {"object": "response.input_tokens", "input_tokens": len(lowered.prompt.tokens)}
