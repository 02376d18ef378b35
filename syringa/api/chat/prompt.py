"""Chat prompts: messages rendered with the model's chat template, tokenized, and fitted into its context."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from syringa.api.chat.content import count_characters
from syringa.api.chat.messages import PromptMessage
from syringa.api.models.served_model import ServedModel
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.output_formats import content_markers
from syringa.prompt.chat.isolated_template import IsolatedTemplate
from syringa.prompt.chat.template import Message, Template
from syringa.prompt.chat.template_capabilities import TemplateCapabilities
from syringa.prompt.chat.tool_messages import add_tool_instructions, rewrite_tool_call_ids, tool_calls_as_text
from syringa.prompt.chat.tools import Tool, ToolUse, tool_definition
from syringa.prompt.images.loader import ImageSource, fetch_images
from syringa.prompt.tokens.control_tokens import ClientTextEscape, strings_of
from syringa.types import Image

# Below this many characters rendering inline is cheaper than in a thread. An empty message counts for a few.
_INLINE_CHARS = 4096
_MESSAGE_CHARS = 16
_INSTRUCTION_ROLES = ("system", "developer")
_OUTPUT_SHARE = 8  # of the context that tools in full have to leave free: one in this many tokens


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered and tokenized conversation. `images` are in the order of their placeholders in the text.

    In `text`, client text that could be taken for control tokens is escaped. `short_tools`: tools are described in
    short.
    """

    text: str
    tokens: list[int]
    images: list[ImageSource]
    short_tools: bool = False


CountImages = Callable[[str, list[int], tuple[Image, ...]], Awaitable[int]]
"""Returns the number of tokens of a prompt with images, given the id of the model and the tokens with placeholders."""


async def count_prompt_tokens(prompt: ChatPrompt, model: ServedModel, tenant: str, count_images: CountImages) -> int:
    """Return the number of tokens of a prompt, as a request with the prompt counts them.

    `count_images` asks the engine, which alone knows the number of tokens of an image.
    """
    if not prompt.images:
        return len(prompt.tokens)
    images = await fetch_images(prompt.images, model.image_policy, tenant)
    return await count_images(model.id, prompt.tokens, tuple(images))


@dataclass(frozen=True, kw_only=True)
class PromptRenderer:
    """Renders the messages of one request into a prompt."""

    model: ServedModel
    template: Template
    tools: ToolUse | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool = False  # those of the tokenizer, before what the template writes
    truncate: Callable[[list[int]], list[int]] | None = None  # cuts the tokens of the prompt
    short_tools: bool = False  # describe tools in short, if the template does not describe them itself

    async def build(self, messages: Sequence[PromptMessage]) -> ChatPrompt:
        """Render and tokenize the messages, in a thread if they are long. Raises `ContextLengthExceeded`."""
        messages = _with_preset_messages(messages, self.model)
        check_message_count(len(messages), self.model, "messages")
        template = self.template
        size = sum(count_characters(each.message["content"]) + _MESSAGE_CHARS for each in messages)
        inline = not isinstance(template, IsolatedTemplate) and size <= _INLINE_CHARS
        if inline and self.tools is None and self.documents is None:
            return self._build(messages)
        # A template may leave out reasoning in the assistant's text.
        texts = (each.message["content"] for each in messages if each.message["role"] != "assistant")
        self.model.check_length(sum(map(count_characters, texts)), "messages")
        if isinstance(template, IsolatedTemplate):
            return await template.run(functools.partial(self._build, messages))
        return await asyncio.to_thread(self._build, messages)

    def _build(self, messages: Sequence[PromptMessage]) -> ChatPrompt:
        """Build the prompt. Tools are described in short if it would otherwise leave little space for the output.

        The tools of a coding agent can take half of a context of 8,192 tokens. A template that describes tools itself
        has them in full.
        """
        if self.tools is None or self.model.formats.supports_tools or self.short_tools:
            return self._build_once(messages)
        limit = self.model.max_model_len
        with contextlib.suppress(ContextLengthExceeded):
            prompt = self._build_once(messages)
            if len(prompt.tokens) <= limit - limit // _OUTPUT_SHARE:
                return prompt
        return dataclasses.replace(self, short_tools=True)._build_once(messages)

    def _build_once(self, messages: Sequence[PromptMessage]) -> ChatPrompt:
        tokenizer = self.model.tokenizer
        plain = [each.message for each in messages]
        definitions = [tool_definition(tool) for tool in self.tools.tools] if self.tools is not None else []
        client_texts = list(strings_of(plain, definitions, self.kwargs, self.documents))
        if tokenizer.control_tokens.may_occur_in(client_texts):
            escape = tokenizer.control_tokens.escape(client_texts)
            text = self._render_escaped(plain, escape)
            tokens = tokenizer.control_tokens.encode_prompt(text, escape.restore)
        else:
            text = self._render(plain, self.tools, self.kwargs, self.documents)
            # The template writes the BOS token itself, if the model has one.
            tokens = tokenizer.encode(text, add_special=False)
        if self.add_special_tokens:
            tokens = tokenizer.encode("") + tokens
        images = [image for each in messages for image in each.images]
        if self.truncate is not None and len(kept := self.truncate(tokens)) < len(tokens):
            if images:
                raise InvalidRequest(
                    "truncate_prompt_tokens: a prompt with images cannot be cut.", param="truncate_prompt_tokens"
                )
            text, tokens = self.model.decode_tokens(kept), kept
        return ChatPrompt(text=text, tokens=tokens, images=images, short_tools=self.short_tools)

    def _render(
        self,
        messages: Sequence[Message],
        use: ToolUse | None,
        kwargs: dict[str, Any],
        documents: list[dict[str, Any]] | None,
    ) -> str:
        capabilities = self.template.capabilities
        tools = None
        if self.model.formats.supports_tools:
            messages = rewrite_tool_call_ids(self.model.formats.tool_calls, messages)
            tools = [tool_definition(tool) for tool in use.tools] if use is not None else None
        else:
            messages = tool_calls_as_text(messages)
            if use is not None:
                messages = add_tool_instructions(
                    messages, use, supports_system=capabilities.supports_system, short=self.short_tools
                )
        text = self.template.render(
            [_adapt_to_template(each, capabilities) for each in messages],
            tools=tools,
            documents=documents,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            kwargs=kwargs,
        )
        self.model.check_length(len(text), "messages")
        return text

    def _render_escaped(self, messages: Sequence[Message], escape: ClientTextEscape) -> str:
        """Render with the client's text escaped. The assistant's messages keep the markers of reasoning and calls."""
        kept = self._kept_markers()
        try:
            escaped = [_escape_message(each, escape, kept) for each in messages]
            kwargs = {name: escape.escape(value) for name, value in self.kwargs.items()}
            use = self.tools
            if use is not None:
                use = msgspec.structs.replace(use, tools=[_escape_tool(tool, escape) for tool in use.tools])
            return self._render(escaped, use, kwargs, escape.escape(self.documents))
        except RecursionError:
            raise InvalidRequest("A value in the request is nested too deeply.") from None
        except InvalidRequest as error:
            raise type(error)(escape.restore(error.message), param=error.param) from None

    def _kept_markers(self) -> re.Pattern[str] | None:
        markers = content_markers(self.model.formats)
        known = self.model.tokenizer.control_tokens.texts
        kept = [token for token in known if any(token in marker for marker in markers)]
        return re.compile(f"({'|'.join(map(re.escape, sorted(kept, key=len, reverse=True)))})") if kept else None


def _with_preset_messages(messages: Sequence[PromptMessage], model: ServedModel) -> Sequence[PromptMessage]:
    """Return the messages of a conversation with those that the model's configuration adds to every one.

    A system message of the conversation takes the place of the configured one, and is the first in any case.
    """
    if not model.system and not model.preset_messages:
        return messages
    preset = [PromptMessage(each) for each in model.preset_messages]
    if messages and messages[0].message["role"] in _INSTRUCTION_ROLES:
        return [messages[0], *preset, *messages[1:]]
    system = [PromptMessage({"role": "system", "content": model.system})] if model.system else []
    return [*system, *preset, *messages]


def check_message_count(count: int, model: ServedModel, param: str) -> None:
    """Raise `ContextLengthExceeded` for more messages than the context has tokens: each takes one at least."""
    if count > model.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {model.max_model_len} tokens; a conversation of {count} messages "
            "has more.",
            param=param,
        )


def adds_generation_prompt(add_generation_prompt: bool | None, continue_final_message: bool | None) -> bool:
    """Return whether the prompt ends with the start of an assistant message. Default: unless the last is continued."""
    return not continue_final_message if add_generation_prompt is None else add_generation_prompt


def require_template(model: ServedModel) -> Template:
    """Return the model's chat template. Raises `InvalidRequest` if it has none."""
    if model.template is None:
        raise InvalidRequest(
            f"The model {model.id!r} has no chat template and cannot take messages. Start the server with"
            " --chat-template to give it one, or send a prompt to /v1/completions.",
            param="model",
        )
    return model.template


def report_ignored_names(messages: Sequence[PromptMessage], template: Template, ignored: list[str]) -> None:
    """Append the `name` fields of messages to `ignored` if the template does not render them."""
    if not template.capabilities.renders_names:
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
    if truncate and len(messages) > limit:
        # No more than the last messages can fit.
        messages = [
            each
            for index, each in enumerate(messages)
            if index >= len(messages) - limit or each.message["role"] in _INSTRUCTION_ROLES
        ]
    can_drop = truncate and available > 0
    try:
        prompt = await renderer.build(messages)
    except ContextLengthExceeded as too_long:
        if not can_drop:
            raise
        # The exception itself would keep this frame, and with it the messages, until the next garbage collection.
        message, param = too_long.message, too_long.param
    else:
        if len(prompt.tokens) <= available:
            return prompt
        needed = (
            f"{max_tokens_field} asks for {max_tokens} more" if max_tokens is not None else "leave no space for output"
        )
        used = f"the messages have {len(prompt.tokens)} and {needed}"
        message = f"This model's maximum context length is {limit} tokens; {used}."
        param = "messages" if available > 0 else max_tokens_field
    fitted = await _drop_oldest_turns(renderer, messages, available) if can_drop else None
    if fitted is None:
        raise ContextLengthExceeded(message, param=param)
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
            if index >= starts[dropped] or each.message["role"] in _INSTRUCTION_ROLES
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


def _escape_message(message: Message, escape: ClientTextEscape, kept: re.Pattern[str] | None) -> Message:
    own_text = ("content", "reasoning_content") if message["role"] == "assistant" else ()
    return {name: escape.escape(value, kept if name in own_text else None) for name, value in message.items()}


def _escape_tool(tool: Tool, escape: ClientTextEscape) -> Tool:
    return msgspec.structs.replace(
        tool,
        name=escape.escape(tool.name),
        description=escape.escape(tool.description),
        parameters=escape.escape(tool.parameters),
    )


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
