"""`POST /v1/responses`: the way from a body to a generation and its writer."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from syringa.api.chat.prompt import ChatPrompt
from syringa.api.decoding import convert
from syringa.api.fields.constraints import compose
from syringa.api.fields.defaults import with_defaults
from syringa.api.fields.metadata import check_metadata
from syringa.api.fields.reasoning import ThinkingRequest
from syringa.api.fields.sampling import to_sampling, to_stop, to_stopping
from syringa.api.models.served_model import Models, ServedModel
from syringa.api.responses.context import Context, ResponseCall
from syringa.api.responses.input import kind_of
from syringa.api.responses.items import new_id
from syringa.api.responses.lowering import lower, read_reasoning
from syringa.api.responses.request import REFUSED, CompactRequest, InputTokensRequest, ResponseRequest
from syringa.api.responses.response_object import ConversationReference, Echo, ReasoningEcho
from syringa.api.responses.schemas import EMPTY_INCLUDES, HONOURED_INCLUDES
from syringa.api.responses.sealing import seal_thought
from syringa.api.responses.text import TextRequest, read_text
from syringa.api.responses.tools import Tools, read_tools
from syringa.api.responses.writer import ResponseWriter, Style
from syringa.errors import InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.images.images import fetch_images
from syringa.types import Grammar, Sampling

_LOGPROBS, _SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"


class StreamOptions(msgspec.Struct, kw_only=True):
    include_obfuscation: bool | None = None


def referenced(body: ResponseRequest | InputTokensRequest | CompactRequest) -> list[str]:
    """The ids that references in the input name, for the caller to look up."""
    items = body.input if isinstance(body.input, list) else []
    ids = [each.get("id") for each in items if kind_of(each) == "item_reference"]
    return [id for id in ids if isinstance(id, str)]


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """A body's fields, read."""

    include: set[str]
    sampling: Sampling
    text: TextRequest
    tools: Tools
    thoughts: ThinkingRequest
    reasoning: ReasoningEcho

    @property
    def use(self) -> ToolUse | None:
        return self.tools.request.use if self.tools.request is not None else None


async def prepare(body: ResponseRequest, models: Models, ignored: list[str], context: Context) -> ResponseCall:
    """Checks what types alone cannot say, renders, tokenizes and fetches images. Nothing has run when this raises."""
    model = await models.find(body.model)
    body = with_defaults(body, model)
    _refuse(body)
    asked = await _read(body, model, ignored, context)
    lowered = await lower(
        body,
        model,
        context,
        ignored,
        tools=asked.use,
        thoughts=asked.thoughts,
        answer=body.max_output_tokens,
        truncate=body.truncation == "auto" or bool(body.truncate_sequence),
    )
    request = await _generation(body, model, asked, lowered.prompt, context.tenant)
    sealed = _SEALED in asked.include
    writer = ResponseWriter(
        id=request.id,
        created=int(time.time()),
        echo=_echo(body, model, asked),
        style=Style(
            model=model,
            custom=asked.tools.custom,
            max_calls=body.max_tool_calls,
            seal=functools.partial(seal_thought, context.seal) if sealed else None,
            open_mode=context.open_mode,
        ),
        prompt_tokens=len(lowered.prompt.tokens),
    )
    return ResponseCall(request=request, writer=writer, model=model, stream=bool(body.stream), input=lowered.items)


async def _read(body: ResponseRequest, model: ServedModel, ignored: list[str], context: Context) -> _Asked:
    _read_stream_options(body, ignored)
    _name_unheeded(body, ignored)
    include = _read_include(body.include or [], ignored)
    sampling = await to_sampling(body, model, ignored)
    text = await read_text(body.text, ignored, open_mode=context.open_mode)
    tools = await read_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False and body.max_tool_calls != 1,
        hold=model.dialect.calls == "plain",
        open_mode=context.open_mode,
    )
    thoughts, reasoning = read_reasoning(
        body.reasoning,
        body.chat_template_kwargs,
        body.thinking_token_budget,
        model,
        ignored,
        open_mode=context.open_mode,
    )
    return _Asked(include=include, sampling=sampling, text=text, tools=tools, thoughts=thoughts, reasoning=reasoning)


async def _generation(
    body: ResponseRequest, model: ServedModel, asked: _Asked, prompt: ChatPrompt, tenant: str
) -> GenerationRequest:
    left = model.max_model_len - len(prompt.tokens)
    stopping = to_stopping(body, model, left if body.max_output_tokens is None else body.max_output_tokens)
    thinking = asked.thoughts.begin(prompt.text, model)
    calls = model.dialect.calls if asked.use is not None else None
    bound = "tools" if asked.use is not None else "text.format.schema"
    if body.grammar is not None:
        bound = "grammar.value"
    grammar = await compose(
        model,
        thinking=thinking,
        constraint=_constraint(asked),
        tools=asked.use,
        format=calls or "plain",
        asked=bound,
    )
    scored = _LOGPROBS in asked.include or bool(body.top_logprobs)
    return GenerationRequest(
        id=new_id("resp"),
        prompts=[prompt.tokens],
        sampling=msgspec.structs.replace(asked.sampling, grammar=grammar, opening=model.opening(asked.use)),
        stopping=stopping,
        stop=to_stop(body.stop),
        logprobs=body.top_logprobs or 0 if scored else None,
        images=tuple(await fetch_images(prompt.images, model.image_policy)) if prompt.images else (),
        output=OutputFormat(
            thought=model.dialect.thought,
            thinking=thinking is not None and thinking.opened,
            calls=calls,
            parameters=asked.tools.request.parameters if asked.tools.request is not None else {},
        ),
        constraint=bound,
        tenant=tenant,
        user=body.safety_identifier if body.user is None else body.user,
    )


def _refuse(body: ResponseRequest) -> None:
    for name, reason in REFUSED.items():
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: {reason}", param=name)
    if body.n not in (None, 1):
        raise InvalidRequest("n: a response is one answer.", param="n")
    if body.background and body.store is False:
        raise InvalidRequest("background: what is not stored cannot be fetched later.", param="background")
    check_conversation(body)
    check_metadata(body.metadata or {})


def check_conversation(body: ResponseRequest | InputTokensRequest) -> None:
    """What came before is named in one way."""
    if body.conversation is not None:
        if not body.conversation_id:
            raise InvalidRequest("conversation: expected an id, or an object with one.", param="conversation")
        if body.previous_response_id is not None:
            said = "conversation has the items of earlier responses already"
            raise InvalidRequest(f"previous_response_id: {said}.", param="previous_response_id")


def _read_stream_options(body: ResponseRequest, ignored: list[str]) -> None:
    if body.stream_options is None:
        return
    if not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    options = convert(body.stream_options, StreamOptions, path="stream_options", ignored=ignored)
    if options.include_obfuscation:
        param = "stream_options.include_obfuscation"
        raise InvalidRequest(f"{param} is not supported.", param=param)


def _read_include(given: list[str], ignored: list[str]) -> set[str]:
    """What else is wanted. Of tools that only OpenAI hosts there are no results to include."""
    for index, each in enumerate(given):
        if each in EMPTY_INCLUDES:
            ignored.append(f"include[{index}]")
        elif each not in HONOURED_INCLUDES:
            param = f"include[{index}]"
            known = ", ".join((*HONOURED_INCLUDES, *EMPTY_INCLUDES))
            raise InvalidRequest(f"{param}: expected one of {known}.", param=param)
    return set(given)


def _name_unheeded(body: ResponseRequest, ignored: list[str]) -> None:
    """Adds what asks for something that is not done here to `ignored`."""
    asks = {
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "prompt_cache_retention": body.prompt_cache_retention is not None,
        "prompt_cache_options": body.prompt_cache_options is not None,
    }
    ignored += [name for name, asked in asks.items() if asked]


def _constraint(asked: _Asked) -> Grammar | None:
    """What the text of the answer is held to: an answer that has to be calls has no text."""
    grammar = asked.sampling.grammar
    if grammar is not None:
        for name, other in (("tools", asked.use), ("text.format", asked.text.grammar)):
            if other is not None:
                raise InvalidRequest(f"grammar and {name} cannot both constrain the answer.", param="grammar")
        return grammar
    return None if asked.use is not None and asked.use.mode == "required" else asked.text.grammar


def _echo(body: ResponseRequest, model: ServedModel, asked: _Asked) -> Echo:
    choice: Any = "auto" if body.tool_choice is None else body.tool_choice
    return Echo(
        model=model.id,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        conversation=None if body.conversation_id is None else ConversationReference(body.conversation_id),
        tools=asked.tools.echo,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        max_tool_calls=body.max_tool_calls,
        text=asked.text.echo,
        reasoning=asked.reasoning,
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
