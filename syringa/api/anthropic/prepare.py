"""Conversion of a message request to a generation request and its writer, and the count of its tokens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from syringa.api.anthropic.conversation import CacheMark, Conversation
from syringa.api.anthropic.message import TokenCountBody
from syringa.api.anthropic.messages import read_conversation
from syringa.api.anthropic.request import (
    CountTokensRequest,
    MessageRequest,
    MetadataConfig,
    OutputConfig,
    OutputFormatConfig,
    PromptBody,
)
from syringa.api.anthropic.thinking import ThinkingRequest, has_thinking, read_thinking, thinking_opener
from syringa.api.anthropic.token_counts import count_tokens
from syringa.api.anthropic.tools import MessageTools, read_message_tools
from syringa.api.anthropic.writer import MessageWriter
from syringa.api.chat.prompt import (
    ChatPrompt,
    CountImages,
    PromptRenderer,
    check_message_count,
    count_prompt_tokens,
    fit_prompt,
    require_template,
)
from syringa.api.decoding import convert
from syringa.api.error_formats import PROMPT_TOO_LONG
from syringa.api.fields.constraints import check_tools_with_constraint, compose_grammar, constraint_name
from syringa.api.fields.defaults import apply_defaults
from syringa.api.fields.grammars import schema_grammar
from syringa.api.fields.sampling import constraint_field, read_stop, to_sampling, to_stop_conditions
from syringa.api.models.served_model import Models, ServedModel
from syringa.api.output_writer import PreparedRequest
from syringa.api.responses.context import Cipher, encrypt_reasoning
from syringa.errors import ContextLengthExceeded, InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.ids import random_id
from syringa.prompt.chat.tools import close_schema
from syringa.prompt.images.loader import fetch_images
from syringa.types import Grammar


@dataclass(frozen=True, kw_only=True)
class MessageContext:
    """What the endpoints know beyond the body. `cipher` returns the cipher of the tenant, from a key in the store."""

    tenant: str
    cipher: Callable[[], Awaitable[Cipher]]


@dataclass(frozen=True, kw_only=True)
class _Prompt:
    """The validated fields that make the prompt, and the prompt."""

    model: ServedModel
    conversation: Conversation
    mark: CacheMark | None
    tools: MessageTools
    thinking: ThinkingRequest
    format: OutputFormatConfig | None
    format_path: str
    renderer: PromptRenderer
    prompt: ChatPrompt


async def prepare_message(
    body: MessageRequest, models: Models, ignored: list[str], context: MessageContext
) -> PreparedRequest:
    """Validate the request, render and tokenize its prompt, and fetch its images.

    Raises before anything is submitted to the engine. The paths of ignored fields are appended to `ignored`.
    """
    model = await models.find(body.model)
    body = apply_defaults(body, model)
    if body.n not in (None, 1):
        raise InvalidRequest("n: a request has one message; n cannot exceed 1.", param="n")
    if body.speed == "fast":
        ignored.append("speed")
    metadata = convert(body.metadata or {}, MetadataConfig, path="metadata", ignored=ignored)
    stop = (*read_stop(body.stop_sequences, "stop_sequences"), *read_stop(body.stop))
    sampling = await to_sampling(body, model, ignored)
    read = await _read_prompt(body, model, ignored, context)
    prompt, tools, use = read.prompt, read.tools.request, read.renderer.tools
    constraint, source_field = await _constraint(body, read, sampling.grammar, ignored)
    available = model.max_model_len - len(prompt.tokens)
    stopping = to_stop_conditions(body, model, min(body.max_tokens, available))
    reasoning = read.thinking.reasoning.for_prompt(prompt.text, model)
    calls = model.formats.tool_calls if use is not None else None
    grammar = await compose_grammar(
        model,
        reasoning=reasoning,
        constraint=constraint,
        tools=use,
        format=calls or "plain",
        source_field=source_field,
        tenant=context.tenant,
        cache_salt=None,
    )
    request = GenerationRequest(
        id=random_id("msg_"),
        prompts=[prompt.tokens],
        sampling=msgspec.structs.replace(sampling, grammar=grammar, opening=model.opening(use)),
        stopping=stopping,
        stop=tuple(dict.fromkeys(stop)),
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        space_special=bool(body.spaces_between_special_tokens),
        report_start=True,
        images=tuple(await fetch_images(prompt.images, model.image_policy, context.tenant)) if prompt.images else (),
        output=OutputFormat(
            reasoning=model.formats.reasoning,
            reasoning_open=reasoning is not None and reasoning.opened,
            tool_calls=calls,
            tool_calls_only=use is not None and use.mode == "required",
            tool_schemas=tools.parameters if tools is not None else {},
        ),
        grammar_param=source_field,
        tenant=context.tenant,
        user=metadata.user_id,
        priority=body.priority or 0,
    )
    seal = functools.partial(encrypt_reasoning, await context.cipher()) if read.thinking.enabled else None
    writer = MessageWriter(
        id=request.id,
        model=model,
        counts=await count_tokens(read.renderer, read.conversation, read.mark, prompt),
        seal=seal,
        show_thinking=read.thinking.shown,
        max_tokens=body.max_tokens,
    )
    return PreparedRequest(request=request, writer=writer, model=model, stream=bool(body.stream))


async def count_message_tokens(
    body: CountTokensRequest, models: Models, ignored: list[str], context: MessageContext, count_images: CountImages
) -> TokenCountBody:
    """Return the number of tokens of the prompt that a message with the same fields has.

    Where the model's defaults truncate long prompts, that of a message with a `max_tokens` of the whole context.
    """
    model = await models.find(body.model)
    prompt = (await _read_prompt(body, model, ignored, context)).prompt
    return TokenCountBody(input_tokens=await count_prompt_tokens(prompt, model, context.tenant, count_images))


async def _read_prompt(body: PromptBody, model: ServedModel, ignored: list[str], context: MessageContext) -> _Prompt:
    try:
        return await _read_fitting_prompt(body, model, ignored, context)
    except ContextLengthExceeded as error:
        raise ContextLengthExceeded(f"{PROMPT_TOO_LONG}: {error.message}") from None


async def _read_fitting_prompt(
    body: PromptBody, model: ServedModel, ignored: list[str], context: MessageContext
) -> _Prompt:
    template = require_template(model)
    if not _truncates(body, model):
        check_message_count(len(body.messages), model, "messages")
    config = convert(body.output_config or {}, OutputConfig, path="output_config", ignored=ignored)
    format, format_path = _read_format(body, config, ignored)
    conversation = await read_conversation(
        body,
        ignored,
        supports_images=model.supports_images,
        supports_late_system=template.capabilities.supports_late_system,
        open_thinking=thinking_opener(await context.cipher() if has_thinking(body.messages) else None),
        unsupported=model.unsupported_tools,
    )
    if conversation.continues and format is not None:
        raise InvalidRequest(
            f"{format_path}: cannot be combined with a last message of the assistant, which the output continues.",
            param=format_path,
        )
    tools = await read_message_tools(
        body.tools,
        body.tool_choice,
        ignored,
        referenced=conversation.referenced_tools,
        changes=conversation.tool_changes,
        constrain_arguments=model.formats.tool_calls == "plain",
        unsupported=model.unsupported_tools,
    )
    thinking = read_thinking(body.thinking, config, model, ignored)
    renderer = PromptRenderer(
        model=model,
        template=template,
        tools=tools.request.use if tools.request is not None else None,
        kwargs=thinking.reasoning.kwargs,
        add_generation_prompt=not conversation.continues,
        continue_final_message=conversation.continues,
    )
    return _Prompt(
        model=model,
        conversation=conversation,
        mark=conversation.mark or conversation.prefix_mark(tools.mark),
        tools=tools,
        thinking=thinking,
        format=format,
        format_path=format_path,
        renderer=renderer,
        prompt=await _build_prompt(body, renderer, conversation),
    )


def _truncates(body: PromptBody, model: ServedModel) -> bool:
    """Return whether the oldest turns of a prompt that is too long are dropped."""
    given = model.defaults.get("truncate_sequence") if isinstance(body, CountTokensRequest) else body.truncate_sequence
    return bool(given)


async def _build_prompt(body: PromptBody, renderer: PromptRenderer, conversation: Conversation) -> ChatPrompt:
    """Build the prompt. One that a message request has must leave space for output."""
    limit = renderer.model.max_model_len
    max_tokens = 0 if isinstance(body, CountTokensRequest) else body.max_tokens
    if _truncates(body, renderer.model):
        wanted = max_tokens if 0 < max_tokens < limit else None
        return await fit_prompt(renderer, conversation.messages, max_tokens=wanted, truncate=True)
    prompt = await renderer.build(conversation.messages)
    if isinstance(body, MessageRequest) and len(prompt.tokens) >= limit:
        raise ContextLengthExceeded(f"{len(prompt.tokens)} tokens > {limit - 1} maximum", param="messages")
    return prompt


def _read_format(body: PromptBody, config: OutputConfig, ignored: list[str]) -> tuple[OutputFormatConfig | None, str]:
    """Return the format of the output and its path."""
    given: Any = body.output_format if config.format is None else config.format
    path = "output_format" if config.format is None else "output_config.format"
    return None if given is None else convert(given, OutputFormatConfig, path=path, ignored=ignored), path


async def _constraint(
    body: MessageRequest, read: _Prompt, grammar: Grammar | None, ignored: list[str]
) -> tuple[Grammar | None, str]:
    """Return the constraint on the text of the output, and the field that it comes from.

    Output that consists of tool calls has no text.
    """
    source = constraint_field(body)
    if read.format is not None:
        source = f"{read.format_path}.schema"
        if grammar is not None:
            name = constraint_name(body)
            raise InvalidRequest(f"{name} and {read.format_path} cannot be combined.", param=name)
        grammar = await asyncio.to_thread(
            schema_grammar, read.format.schema, source, ignored=ignored, close=close_schema
        )
    use = read.renderer.tools
    if use is None:
        return grammar, source
    check_tools_with_constraint(body)
    return (grammar if use.mode == "auto" else None), "tools"
