"""From messages to the tokens of a prompt: through the model's template, and into its context."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from syringa.api.chat.content import characters
from syringa.api.chat.messages import Said
from syringa.api.models.served_model import ServedModel
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.prompt.chat.call_ids import with_ids_of
from syringa.prompt.chat.plain_tools import with_tools, without_calls
from syringa.prompt.chat.template import ChatTemplate, Message
from syringa.prompt.chat.template_traits import Traits, traits
from syringa.prompt.chat.tools import ToolUse, describe
from syringa.prompt.images.images import ImageSource

# Below this many characters rendering is cheaper than the hop to a thread; a message costs something even if empty.
_INLINE_CHARS = 4096
_MESSAGE_CHARS = 16


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A rendered conversation. `images` stand where the text has their placeholders."""

    text: str
    tokens: list[int]
    images: list[ImageSource]


@dataclass(frozen=True, kw_only=True)
class Rendering:
    """How the messages of one request become a prompt."""

    model: ServedModel
    template: ChatTemplate
    tools: ToolUse | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def render(self, said: Sequence[Said]) -> str:
        nature = traits(self.template)
        messages = [each.message for each in said]
        tools = None
        if self.model.dialect.knows_tools:
            messages = with_ids_of(self.model.dialect.calls, messages)
            tools = [describe(tool) for tool in self.tools.tools] if self.tools is not None else None
        else:
            messages = without_calls(messages)
            if self.tools is not None:
                messages = with_tools(messages, self.tools, takes_system=nature.takes_system)
        return self.template.render(
            [_suited(each, nature) for each in messages],
            tools=tools,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            kwargs=self.kwargs,
        )

    async def prompt(self, said: Sequence[Said]) -> ChatPrompt:
        """Renders and tokenizes, in a thread where it takes a while."""
        size = sum(characters(each.message["content"]) + _MESSAGE_CHARS for each in said)
        if self.tools is None and size <= _INLINE_CHARS:
            text = self.render(said)
        else:
            text = await asyncio.to_thread(self.render, said)
        try:
            # The template has written the model's first token, if it has one.
            (tokens,) = await self.model.encode_all([text], special=False)
        except ContextLengthExceeded as error:
            raise ContextLengthExceeded(error.message, param="messages") from None
        return ChatPrompt(text=text, tokens=tokens, images=[image for each in said for image in each.images])


def template_of(model: ServedModel) -> ChatTemplate:
    """The model's template. There is no other way to tell who said what."""
    if model.template is None:
        raise InvalidRequest(
            f"The model {model.id!r} has no chat template, so that it cannot be given messages. Start the server with"
            " --chat-template to give it one, or send a prompt to /v1/completions.",
            param="model",
        )
    return model.template


def name_unread(said: Sequence[Said], template: ChatTemplate, ignored: list[str]) -> None:
    """Adds the names of speakers to `ignored` where the template does not show them to the model."""
    if not traits(template).reads_names:
        messages = (each.message for each in said)
        ignored += [
            f"messages[{i}].name" for i, each in enumerate(messages) if "name" in each and each["role"] != "tool"
        ]


async def fit(
    rendering: Rendering, said: Sequence[Said], *, answer: int | None, truncate: bool, asked: str = "max_tokens"
) -> ChatPrompt:
    """The prompt, which leaves room for an `answer` of that many tokens; None: for any.

    With `truncate` the oldest turns go until it fits; instructions and the last turn stay. `asked` is the field that
    the length of the answer came from.
    """
    limit = rendering.model.max_model_len
    room = limit - (1 if answer is None else answer)
    try:
        prompt = await rendering.prompt(said)
        if len(prompt.tokens) <= room:
            return prompt
        wanted = f"{asked} asks for {answer} more" if answer is not None else "leave no room for an answer"
        error = ContextLengthExceeded(
            f"The model's context is {limit} tokens; the messages have {len(prompt.tokens)} and {wanted}.",
            param="messages" if room > 0 else asked,
        )
    except ContextLengthExceeded as too_long:
        error = too_long
    fitting = await _without_oldest(rendering, said, room) if truncate and room > 0 else None
    if fitting is None:
        raise error
    return fitting


async def _without_oldest(rendering: Rendering, said: Sequence[Said], room: int) -> ChatPrompt | None:
    """The prompt that lacks the fewest turns and fits. Each try renders anew, so they are halved, not counted down."""
    starts = [index for index, each in enumerate(said) if each.message["role"] == "user"]
    found = None
    least, most = 1, len(starts) - 1
    while least <= most:
        dropped = (least + most) // 2
        kept = [
            each
            for index, each in enumerate(said)
            if index >= starts[dropped] or each.message["role"] in ("system", "developer")
        ]
        try:
            prompt = await rendering.prompt(kept)
        except ContextLengthExceeded:
            least = dropped + 1
            continue
        if len(prompt.tokens) <= room:
            found, most = prompt, dropped - 1
        else:
            least = dropped + 1
    return found


def _suited(message: Message, nature: Traits) -> Message:
    """The message with what the template has no notion of put in its terms."""
    if message["role"] == "developer" and not nature.knows_developer:
        return {**message, "role": "system"}
    if message.get("tool_calls"):
        content = nature.empty if message["content"] is None else message["content"]
        calls = message["tool_calls"]
        return {**message, "content": content, "tool_calls": _as_text(calls) if nature.arguments_as_text else calls}
    return message


def _as_text(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    functions = [call["function"] for call in calls]
    texts = [json.dumps(each["arguments"], ensure_ascii=False) for each in functions]
    return [
        {**call, "function": {**each, "arguments": text}}
        for call, each, text in zip(calls, functions, texts, strict=True)
    ]
