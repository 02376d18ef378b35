"""Chat prompts: messages rendered with the model's chat template, tokenized, and fitted into its context."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from syringa.api.chat.content import count_characters
from syringa.api.chat.messages import PromptMessage
from syringa.api.models.served_model import ServedModel
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.prompt.chat.template import ChatTemplate, Message
from syringa.prompt.chat.template_capabilities import TemplateCapabilities, probe_template
from syringa.prompt.chat.tool_messages import add_tool_instructions, rewrite_tool_call_ids, tool_calls_as_text
from syringa.prompt.chat.tools import ToolUse, tool_definition
from syringa.prompt.images.loader import ImageSource

# Below this many characters rendering inline is cheaper than in a thread. An empty message counts for a few.
_INLINE_CHARS = 4096
_MESSAGE_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered and tokenized conversation. `images` are in the order of their placeholders in the text."""

    text: str
    tokens: list[int]
    images: list[ImageSource]


@dataclass(frozen=True, kw_only=True)
class PromptRenderer:
    """Renders the messages of one request into a prompt."""

    model: ServedModel
    template: ChatTemplate
    tools: ToolUse | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def render(self, messages: Sequence[PromptMessage]) -> str:
        """Return the text of the prompt."""
        capabilities = probe_template(self.template)
        plain = [each.message for each in messages]
        tools = None
        if self.model.formats.supports_tools:
            plain = rewrite_tool_call_ids(self.model.formats.tool_calls, plain)
            tools = [tool_definition(tool) for tool in self.tools.tools] if self.tools is not None else None
        else:
            plain = tool_calls_as_text(plain)
            if self.tools is not None:
                plain = add_tool_instructions(plain, self.tools, supports_system=capabilities.supports_system)
        return self.template.render(
            [_adapt_to_template(each, capabilities) for each in plain],
            tools=tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            kwargs=self.kwargs,
        )

    async def build(self, messages: Sequence[PromptMessage]) -> ChatPrompt:
        """Render and tokenize the messages, in a thread if they are long. Raises `ContextLengthExceeded`."""
        size = sum(count_characters(each.message["content"]) + _MESSAGE_CHARS for each in messages)
        if self.tools is None and size <= _INLINE_CHARS:
            text = self.render(messages)
        else:
            text = await asyncio.to_thread(self.render, messages)
        try:
            # The template writes the BOS token itself, if the model has one.
            (tokens,) = await self.model.encode_all([text], special=False)
        except ContextLengthExceeded as error:
            raise ContextLengthExceeded(error.message, param="messages") from None
        return ChatPrompt(text=text, tokens=tokens, images=[image for each in messages for image in each.images])


def adds_generation_prompt(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether the prompt ends with the start of an assistant message. Default: unless the last is continued."""
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


def require_template(model: ServedModel) -> ChatTemplate:
    """Return the model's chat template. Raises `InvalidRequest` if it has none."""
    if model.template is None:
        raise InvalidRequest(
            f"The model {model.id!r} has no chat template and cannot take messages. Start the server with"
            " --chat-template to give it one, or send a prompt to /v1/completions.",
            param="model",
        )
    return model.template


def report_ignored_names(messages: Sequence[PromptMessage], template: ChatTemplate, ignored: list[str]) -> None:
    """Append the `name` fields of messages to `ignored` if the template does not render them."""
    if not probe_template(template).renders_names:
        ignored += [
            f"messages[{index}].name"
            for index, each in enumerate(messages)
            if "name" in each.message and each.message["role"] != "tool"
        ]


async def fit_prompt(
    renderer: PromptRenderer,
    messages: Sequence[PromptMessage],
    *,
    max_tokens: int | None,
    truncate: bool,
    max_tokens_field: str = "max_tokens",
) -> ChatPrompt:
    """Build a prompt that leaves space for `max_tokens` of output, or for one token if that is None.

    With `truncate`, the oldest turns are dropped until it fits; instructions and the last turn stay.
    `max_tokens_field` is the request field that `max_tokens` came from. Raises `ContextLengthExceeded`.
    """
    limit = renderer.model.max_model_len
    available = limit - (1 if max_tokens is None else max_tokens)
    try:
        prompt = await renderer.build(messages)
        if len(prompt.tokens) <= available:
            return prompt
        needed = (
            f"{max_tokens_field} asks for {max_tokens} more" if max_tokens is not None else "leave no space for output"
        )
        error = ContextLengthExceeded(
            f"The model's context is {limit} tokens; the messages have {len(prompt.tokens)} and {needed}.",
            param="messages" if available > 0 else max_tokens_field,
        )
    except ContextLengthExceeded as too_long:
        error = too_long
    fitted = await _drop_oldest_turns(renderer, messages, available) if truncate and available > 0 else None
    if fitted is None:
        raise error
    return fitted


async def _drop_oldest_turns(
    renderer: PromptRenderer, messages: Sequence[PromptMessage], available: int
) -> ChatPrompt | None:
    """Return the prompt that fits with the fewest turns dropped, found by binary search."""
    starts = [index for index, each in enumerate(messages) if each.message["role"] == "user"]
    found = None
    low, high = 1, len(starts) - 1
    while low <= high:
        dropped = (low + high) // 2
        kept = [
            each
            for index, each in enumerate(messages)
            if index >= starts[dropped] or each.message["role"] in ("system", "developer")
        ]
        try:
            prompt = await renderer.build(kept)
        except ContextLengthExceeded:
            low = dropped + 1
            continue
        if len(prompt.tokens) <= available:
            found, high = prompt, dropped - 1
        else:
            low = dropped + 1
    return found


def _adapt_to_template(message: Message, capabilities: TemplateCapabilities) -> Message:
    """Return the message in the form that the template can render."""
    if message["role"] == "developer" and not capabilities.supports_developer:
        return {**message, "role": "system"}
    if message.get("tool_calls"):
        content = capabilities.empty_content if message["content"] is None else message["content"]
        calls = message["tool_calls"]
        return {
            **message,
            "content": content,
            "tool_calls": _with_json_arguments(calls) if capabilities.arguments_as_text else calls,
        }
    return message


def _with_json_arguments(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tool calls with their arguments as JSON text."""
    functions = [call["function"] for call in calls]
    texts = [json.dumps(each["arguments"], ensure_ascii=False) for each in functions]
    return [
        {**call, "function": {**each, "arguments": text}}
        for call, each, text in zip(calls, functions, texts, strict=True)
    ]
