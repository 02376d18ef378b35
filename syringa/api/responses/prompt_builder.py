"""Builds the prompt of a response from its input items, instructions and history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from syringa.api.chat.messages import PromptMessage
from syringa.api.chat.prompt import ChatPrompt, PromptRenderer, check_message_count, fit_prompt, require_template
from syringa.api.decoding import convert
from syringa.api.fields.reasoning import Effort, ReasoningRequest, read_reasoning_request
from syringa.api.models.served_model import ServedModel
from syringa.api.responses.context import ResponseContext
from syringa.api.responses.input import ParsedInput, read_input
from syringa.api.responses.message_builder import merge_messages
from syringa.api.responses.response_object import ReasoningEcho
from syringa.api.responses.schemas import EFFORTS
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import ToolUse

_INSTRUCTION_ROLES = ("system", "developer")
_OPEN_EFFORTS = ("none", "low", "medium", "high", "xhigh")


class ReasoningField(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class PromptFields(Protocol):
    """The request fields that make up the prompt."""

    @property
    def input(self) -> Any: ...
    @property
    def instructions(self) -> str | None: ...
    @property
    def previous_response_id(self) -> str | None: ...


def read_reasoning_field(
    given: dict[str, Any] | None,
    kwargs: dict[str, Any] | None,
    budget: int | None,
    model: ServedModel,
    ignored: list[str],
    *,
    open_mode: bool,
) -> tuple[ReasoningRequest, ReasoningEcho]:
    """Validate `reasoning`. Returns the reasoning settings, and what the response repeats of them.

    Reasoning summaries are not supported and are reported in `ignored`.
    """
    options = convert(given or {}, ReasoningField, path="reasoning", ignored=ignored)
    efforts = _OPEN_EFFORTS if open_mode else EFFORTS
    effort = _check_value(efforts, options.effort, "reasoning.effort")
    for name in ("summary", "generate_summary"):
        if _check_value(("auto", "concise", "detailed"), getattr(options, name), f"reasoning.{name}") is not None:
            ignored.append(f"reasoning.{name}")
    checked: Effort | None = effort  # type: ignore[assignment] # `_check_value` has validated it
    request = read_reasoning_request(kwargs, checked, budget, model, ignored, effort_field="reasoning.effort")
    return request, ReasoningEcho(effort, options.summary or options.generate_summary)


def _check_value(known: Sequence[str], given: str | None, param: str) -> str | None:
    if given is not None and given not in known:
        raise InvalidRequest(f"{param}: expected {', '.join(known)}, not {given!r}.", param=param)
    return given


async def read_prompt_input(
    body: PromptFields, model: ServedModel, context: ResponseContext, ignored: list[str], *, truncate: bool
) -> ParsedInput:
    """Read the history and the input. With `truncate`, there may be more items than the context has tokens."""
    require_template(model)
    history_field = "previous_response_id" if body.previous_response_id is not None else "conversation"
    if not truncate:
        new_items = len(body.input) if isinstance(body.input, list) else 1
        check_message_count(len(context.history) + new_items, model, "input")
    return await read_input(
        body.input,
        context,
        supports_images=model.supports_images,
        ignored=ignored,
        history_field=history_field,
        unsupported=model.unsupported_tools,
    )


async def build_prompt(
    messages: list[PromptMessage],
    model: ServedModel,
    *,
    instructions: str | None,
    reasoning: ReasoningRequest,
    tools: ToolUse | None = None,
    max_tokens: int | None = None,
    truncate: bool = False,
    final_message: str | None = None,
) -> ChatPrompt:
    """Render a conversation. `final_message` is appended as a user message.

    The prompt leaves space for `max_tokens` of output; with `truncate` the oldest turns are dropped until it does.
    """
    messages = _with_instructions(messages, instructions)
    if final_message is not None:
        messages = _with_user_message(messages, final_message)
    renderer = PromptRenderer(model=model, template=require_template(model), tools=tools, kwargs=reasoning.kwargs)
    try:
        return await fit_prompt(
            renderer, messages, max_tokens=max_tokens, truncate=truncate, max_tokens_field="max_output_tokens"
        )
    except InvalidRequest as error:
        if error.param is None or not error.param.startswith("messages"):
            raise
        raise type(error)(error.message, param="input") from None


def _with_instructions(messages: list[PromptMessage], instructions: str | None) -> list[PromptMessage]:
    """Return the messages with instructions first, merged into a system or developer message that follows."""
    if instructions is None:
        return messages
    first = PromptMessage({"role": "system", "content": instructions})
    if messages[0].message["role"] in _INSTRUCTION_ROLES:
        return [*merge_messages([first, messages[0]]), *messages[1:]]
    return [first, *messages]


def _with_user_message(messages: list[PromptMessage], text: str) -> list[PromptMessage]:
    question = PromptMessage({"role": "user", "content": text})
    if messages[-1].message["role"] == "user":
        return [*messages[:-1], *merge_messages([messages[-1], question])]
    return [*messages, question]
