"""`/v1/responses` and `/v1/responses/input_tokens`: conversion of a body to a generation request and its writer."""

from __future__ import annotations

import functools
import time
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from syringa.api.chat.prompt import ChatPrompt, CountImages, count_prompt_tokens
from syringa.api.decoding import convert
from syringa.api.fields.common import check_metadata
from syringa.api.fields.compatibility import read_compatibility_fields
from syringa.api.fields.defaults import apply_defaults
from syringa.api.fields.sampling import to_sampling
from syringa.api.models.served_model import Models, ServedModel
from syringa.api.responses.context import PreparedResponse, ResponseContext, encrypt_reasoning
from syringa.api.responses.generation_request import ParsedFields, build_generation_request
from syringa.api.responses.input import ParsedInput, item_type
from syringa.api.responses.mcp.continuation import NextRequestBuilder
from syringa.api.responses.mcp.rounds import McpRounds
from syringa.api.responses.mcp.tools import McpTools, read_mcp_tools
from syringa.api.responses.prompt_builder import build_prompt, read_prompt_input, read_reasoning_field
from syringa.api.responses.request import REFUSED, CompactRequest, InputTokensRequest, ResponseRequest
from syringa.api.responses.response_object import ConversationReference, RequestEcho
from syringa.api.responses.schemas import EMPTY_INCLUDES, HONORED_INCLUDES
from syringa.api.responses.text import read_text
from syringa.api.responses.tools import read_response_tools
from syringa.api.responses.writer import ResponseWriter, WriterOptions
from syringa.errors import InvalidRequest

_INCLUDE_ENCRYPTED = "reasoning.encrypted_content"


class ResponseStreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


def referenced_item_ids(body: ResponseRequest | InputTokensRequest | CompactRequest) -> list[str]:
    """Return the ids of the item references in the input, for the caller to look up."""
    items = body.input if isinstance(body.input, list) else []
    ids = [each.get("id") for each in items if item_type(each) == "item_reference"]
    return [id for id in ids if isinstance(id, str)]


async def prepare_response(
    body: ResponseRequest, models: Models, ignored: list[str], context: ResponseContext
) -> PreparedResponse:
    """Validate the request, render and tokenize its prompt, and fetch its images.

    Raises before anything is submitted to the engine. The paths of ignored fields are appended to `ignored`.
    """
    model = await models.find(body.model)
    body = apply_defaults(read_compatibility_fields(body, ignored), model)
    _reject_unsupported(body)
    truncate = body.truncation == "auto" or bool(body.truncate_sequence)
    parsed = await read_prompt_input(body, model, context, ignored, truncate=truncate)
    fields = await _read_fields(body, model, parsed, ignored, context)
    prompt = await build_prompt(
        parsed.messages,
        model,
        instructions=body.instructions,
        reasoning=fields.reasoning,
        tools=fields.tool_use,
        max_tokens=body.max_output_tokens,
        truncate=truncate,
    )
    request = await build_generation_request(body, model, fields, prompt, context.tenant)
    writer = ResponseWriter(
        id=request.id,
        created=int(time.time()),
        echo=_echo(body, model, fields),
        options=WriterOptions(
            model=model,
            tools=fields.tools.keys,
            max_tool_calls=body.max_tool_calls,
            max_mcp_calls=context.max_mcp_calls,
            needs_approval=fields.mcp.needs_approval,
            approved=frozenset(call.request_id for call in parsed.approved_calls),
            encrypt_reasoning=functools.partial(encrypt_reasoning, context.cipher)
            if _INCLUDE_ENCRYPTED in fields.include
            else None,
            include_reasoning=body.include_reasoning is not False,
            open_mode=context.open_mode,
        ),
        prompt_tokens=len(prompt.tokens),
    )
    rounds = None
    if fields.mcp.servers and context.mcp is not None:
        rounds = McpRounds(
            first=request,
            build=NextRequestBuilder(body, model, fields, context, parsed.items, writer, request, prompt).build,
            writer=writer,
            tools=fields.mcp,
            approved=parsed.approved_calls,
            client=context.mcp,
            max_calls=context.max_mcp_calls,
            max_tool_calls=body.max_tool_calls,
        )
    return PreparedResponse(
        request=request,
        writer=writer,
        model=model,
        stream=bool(body.stream),
        rounds=rounds,
        input=parsed.items,
    )


class PreparedCount(NamedTuple):
    """The prompt that a response would have."""

    prompt: ChatPrompt
    model: ServedModel
    tenant: str

    async def count_tokens(self, count_images: CountImages) -> dict[str, Any]:
        """Return the number of its tokens. With images, this takes as long as loading the model."""
        counted = await count_prompt_tokens(self.prompt, self.model, self.tenant, count_images)
        return {"object": "response.input_tokens", "input_tokens": counted}


async def prepare_count(
    body: InputTokensRequest, models: Models, ignored: list[str], context: ResponseContext
) -> PreparedCount:
    """Render and tokenize the prompt that a response would have."""
    model = await models.find(body.model)
    check_conversation(body)
    if body.personality is not None:
        ignored.append("personality")
    await read_text(body.text, ignored, open_mode=context.open_mode)
    truncate = body.truncation == "auto"
    parsed = await read_prompt_input(body, model, context, ignored, truncate=truncate)
    mcp = await _read_mcp(body, parsed, context, ignored)
    tools = await read_response_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False,
        constrain_arguments=model.formats.tool_calls == "plain",
        open_mode=context.open_mode,
        added=[*parsed.added_tools, *mcp.definitions],
        unsupported=model.unsupported_tools,
    )
    reasoning, _ = read_reasoning_field(
        body.reasoning, body.chat_template_kwargs, None, model, ignored, open_mode=context.open_mode
    )
    prompt = await build_prompt(
        parsed.messages,
        model,
        instructions=body.instructions,
        reasoning=reasoning,
        tools=tools.request.use if tools.request is not None else None,
        truncate=truncate,
    )
    return PreparedCount(prompt, model, context.tenant)


async def _read_fields(
    body: ResponseRequest, model: ServedModel, parsed: ParsedInput, ignored: list[str], context: ResponseContext
) -> ParsedFields:
    _read_stream_options(body, ignored)
    _report_ignored(body, ignored)
    include = _read_include(body.include or [], ignored)
    sampling = await to_sampling(body, model, ignored)
    text = await read_text(body.text, ignored, open_mode=context.open_mode)
    mcp = await _read_mcp(body, parsed, context, ignored)
    tools = await read_response_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False and body.max_tool_calls != 1,
        constrain_arguments=model.formats.tool_calls == "plain",
        open_mode=context.open_mode,
        added=[*parsed.added_tools, *mcp.definitions],
        unsupported=model.unsupported_tools,
    )
    reasoning, reasoning_echo = read_reasoning_field(
        body.reasoning,
        body.chat_template_kwargs,
        body.thinking_token_budget,
        model,
        ignored,
        open_mode=context.open_mode,
    )
    return ParsedFields(
        include=include,
        sampling=sampling,
        text=text,
        tools=tools,
        mcp=mcp,
        reasoning=reasoning,
        reasoning_echo=reasoning_echo,
    )


async def _read_mcp(
    body: ResponseRequest | InputTokensRequest, parsed: ParsedInput, context: ResponseContext, ignored: list[str]
) -> McpTools:
    """Return the tools of MCP servers, and check that the calls that the client approves are calls of them."""
    if context.open_mode:  # which does not have them
        return McpTools()
    mcp = await read_mcp_tools(body.tools, context.mcp, parsed.mcp_lists, ignored)
    known = {(each.key.namespace, each.key.name) for each in mcp.definitions}
    for call in parsed.approved_calls:
        if (call.server_label, call.name) not in known:
            raise InvalidRequest(
                f"{call.path}: tools has no MCP server {call.server_label!r} with an allowed tool {call.name!r}.",
                param=call.path,
            )
    return mcp


def _reject_unsupported(body: ResponseRequest) -> None:
    for name, reason in REFUSED.items():
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: {reason}", param=name)
    if body.n not in (None, 1):
        raise InvalidRequest("n: a response has one output; n cannot exceed 1.", param="n")
    if body.background and body.store is False:
        raise InvalidRequest(
            "background: requires store, so that the response can be fetched later.", param="background"
        )
    check_conversation(body)
    check_metadata(body.metadata or {})


def check_conversation(body: ResponseRequest | InputTokensRequest) -> None:
    """Raise `InvalidRequest` if the conversation is invalid or combined with a previous response."""
    if body.conversation is not None:
        if not body.conversation_id:
            raise InvalidRequest("conversation: expected an id, or an object with one.", param="conversation")
        if body.previous_response_id is not None:
            raise InvalidRequest(
                "previous_response_id and conversation cannot be combined.", param="previous_response_id"
            )


def _read_stream_options(body: ResponseRequest, ignored: list[str]) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options requires stream: true.", param="stream_options")
    options = convert(body.stream_options, ResponseStreamOptions, path="stream_options", ignored=ignored)
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise InvalidRequest(f"{param} is not supported.", param=param)


def _read_include(given: list[str], ignored: list[str]) -> set[str]:
    """Validate `include`. Results of tools that OpenAI hosts do not exist here and are reported in `ignored`."""
    for index, each in enumerate(given):
        if each in EMPTY_INCLUDES:
            ignored.append(f"include[{index}]")
        elif each not in HONORED_INCLUDES:
            param = f"include[{index}]"
            known = ", ".join((*HONORED_INCLUDES, *EMPTY_INCLUDES))
            raise InvalidRequest(f"{param}: expected one of {known}.", param=param)
    return set(given)


def _report_ignored(body: ResponseRequest, ignored: list[str]) -> None:
    """Append the names of fields that ask for something unsupported to `ignored`."""
    unsupported = {
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "prompt_cache_retention": body.prompt_cache_retention is not None,
        "prompt_cache_options": body.prompt_cache_options is not None,
        "request_id": body.request_id is not None,
    }
    ignored += [name for name, asked in unsupported.items() if asked]


def _echo(body: ResponseRequest, model: ServedModel, fields: ParsedFields) -> RequestEcho:
    choice: Any = "auto" if body.tool_choice is None else body.tool_choice
    return RequestEcho(
        model=model.id,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        conversation=None if body.conversation_id is None else ConversationReference(body.conversation_id),
        tools=fields.tools.echo,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tool_calls=body.max_tool_calls,
        text=fields.text.echo,
        reasoning=fields.reasoning_echo,
        truncation=body.truncation or "disabled",
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        top_logprobs=body.top_logprobs or 0,
        max_output_tokens=body.max_output_tokens,
        store=body.store is not False,
        background=bool(body.background),
        metadata=body.metadata or {},
        safety_identifier=body.safety_identifier,
        prompt_cache_key=body.prompt_cache_key,
        user=UNSET if body.user is None else body.user,
    )
