"""`/v1/chat/completions`: the request body, and its conversion to a generation request."""

from __future__ import annotations

import functools
import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.chat.messages import MessagesField, read_messages
from syringa.api.chat.prompt import (
    ChatPrompt,
    PromptRenderer,
    adds_generation_prompt,
    check_message_count,
    fit_prompt,
    report_ignored_names,
    require_template,
)
from syringa.api.chat.request_template import ChatTemplateField, with_request_template
from syringa.api.chat.writer import ChatWriter
from syringa.api.fields.beam_search import read_beam_search
from syringa.api.fields.common import (
    CacheSaltField,
    MetadataField,
    StreamOptionsField,
    check_choices,
    check_metadata,
    read_stream_options,
)
from syringa.api.fields.compatibility import read_compatibility_fields
from syringa.api.fields.constraints import check_tools_with_constraint, compose_grammar
from syringa.api.fields.defaults import apply_defaults
from syringa.api.fields.reasoning import BudgetField, Effort, ReasoningRequest, read_reasoning_request
from syringa.api.fields.sampling import (
    MAX_COUNT,
    constraint_field,
    read_stop,
    to_sampling,
    to_stop_conditions,
)
from syringa.api.fields.schema import doc, ignored_field, refused_field
from syringa.api.fields.token_output import TokenCounter, TokenFields, read_token_output, truncate_prompt
from syringa.api.fields.tools import HOSTED_TOOLS_DOC, ToolChoiceField, ToolRequest, ToolsField, read_tools
from syringa.api.models.served_model import Models, ServedModel
from syringa.api.output_writer import PreparedRequest
from syringa.errors import InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.ids import random_id
from syringa.prompt.chat.template import Template
from syringa.prompt.images.loader import fetch_images
from syringa.types import Grammar

Length = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
_REFUSED = {
    "audio": "Audio is not supported.",
    "prediction": "Predicted outputs are not supported.",
    "web_search_options": "Web search is not supported.",
    "moderation": "Moderation is not supported.",
    "functions": "Deprecated and not supported; use `tools`.",
    "function_call": "Deprecated and not supported; use `tool_choice`.",
}


def _unsupported(name: str) -> Meta:
    return refused_field(_REFUSED[name], type="null")


class ChatRequest(TokenFields, kw_only=True):
    """The body of `POST /v1/chat/completions` and `POST /api/v2/chat/completions`."""

    messages: Annotated[
        MessagesField, doc("The conversation: system, developer, user, assistant and tool messages; at least one.")
    ]
    model: Annotated[
        str | None, doc("Model id from `/v1/models`, an alias, or `default`. Default: the default model.")
    ] = None
    max_completion_tokens: Annotated[
        Length | None, doc("Maximum number of output tokens, reasoning included. Default: the rest of the context.")
    ] = None
    max_tokens: Annotated[Length | None, doc("Same as `max_completion_tokens`, which takes precedence.")] = None
    stream: Annotated[bool | None, doc("Stream the output as server-sent events.", False)] = None
    stream_options: StreamOptionsField = None
    logprobs: Annotated[bool | None, doc("Return the log-probabilities of the output tokens.", False)] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None,
        doc("Number of most likely tokens to return at each position, 0 to 20; requires `logprobs: true`.", 0),
    ] = None
    tools: Annotated[
        ToolsField,
        doc(f"Functions that the model may call, at most 128; cannot be combined with `grammar`. {HOSTED_TOOLS_DOC}"),
    ] = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: Annotated[
        bool | None, doc("Whether the model may make several calls in one message.", True)
    ] = None
    chat_template: ChatTemplateField = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        doc("Extra variables for the chat template. `thinking` or `enable_thinking`: false turns reasoning off."),
    ] = None
    reasoning_effort: Annotated[
        Effort | None,
        doc(
            "`none` turns reasoning off; other values are passed to the chat template, or become a token budget if the "
            "template has no such variable."
        ),
    ] = None
    thinking_token_budget: BudgetField = None
    reasoning_budget_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None,
        doc("Same as `thinking_token_budget`, which takes precedence."),
    ] = None
    thinking_budget_tokens: Annotated[
        Annotated[int, Meta(ge=-1, le=MAX_COUNT)] | None, doc("Same as `reasoning_budget_tokens`.")
    ] = None
    include_reasoning: Annotated[
        bool | None, doc("Return the reasoning; false: it is generated and counted, but left out.", True)
    ] = None
    documents: Annotated[
        list[dict[str, Any]] | None,
        doc("Documents for the chat template; reported as ignored if the template does not read `documents`."),
    ] = None
    echo: Annotated[
        bool | None,
        doc("If the last message is the assistant's, return its text before the text that continues it.", False),
    ] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("Add the tokenizer's special tokens, such as BOS, to those that the chat template writes.", False),
    ] = None
    return_prompt_text: Annotated[
        bool | None, doc("Return the prompt that the chat template rendered as `prompt_text`.", False)
    ] = None
    add_generation_prompt: Annotated[
        bool | None,
        doc("Append the start of an assistant message to the prompt. Default: true, unless `continue_final_message`."),
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("Continue the last message instead of starting a new one.", False)
    ] = None
    user: Annotated[str | None, doc("End-user id, stored with the usage record.")] = None
    safety_identifier: Annotated[
        Annotated[str, Meta(max_length=64)] | None,
        doc("End-user id, stored with the usage record if `user` is absent; at most 64 characters."),
    ] = None
    metadata: Annotated[
        MetadataField,
        doc("Up to 16 key-value pairs, returned in the body; ignored in a stream."),
    ] = None
    store: Annotated[
        Annotated[bool, Meta(extra_json_schema={"const": False})] | None,
        refused_field("Refused if true: only `/v1/responses` stores its output."),
    ] = None
    modalities: Annotated[
        Annotated[list[Any], Meta(extra_json_schema={"items": {"const": "text"}})] | None,
        doc("Only `text` is supported; `audio` is refused."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
        ignored_field("There is one tier; values other than `auto` and `default` are reported as ignored."),
    ] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, ignored_field("Values other than `medium` are reported as ignored.")
    ] = None
    prompt_cache_key: Annotated[
        str | None, ignored_field("The prefix cache is keyed by content; reported as ignored.")
    ] = None
    cache_salt: CacheSaltField = None
    audio: Annotated[Any, _unsupported("audio")] = None
    prediction: Annotated[Any, _unsupported("prediction")] = None
    web_search_options: Annotated[Any, _unsupported("web_search_options")] = None
    moderation: Annotated[Any, _unsupported("moderation")] = None
    functions: Annotated[Any, _unsupported("functions")] = None
    function_call: Annotated[Any, _unsupported("function_call")] = None

    @property
    def length(self) -> int | None:
        """The maximum number of output tokens that the request asks for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


async def prepare_chat(
    body: ChatRequest, models: Models, ignored: list[str], tenant: str = "", *, always_include_usage: bool = False
) -> PreparedRequest:
    """Validate the request, render and tokenize its prompt, and fetch its images.

    Raises before anything is submitted to the engine. The paths of ignored fields are appended to `ignored`.
    """
    model = await models.find(body.model)
    body = _resolve_names(read_compatibility_fields(body, ignored))
    body = apply_defaults(body, model)
    _reject_unsupported(body)
    check_choices(1, body.n or 1, model.max_choices, "n")
    _report_ignored(body, ignored)
    model = await with_request_template(model, body.chat_template, tenant)
    options = read_stream_options(
        body.stream_options, stream=bool(body.stream), ignored=ignored, always_include_usage=always_include_usage
    )
    stop = read_stop(body.stop)
    sampling = await to_sampling(body, model, ignored)
    tools = await read_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False,
        constrain_arguments=model.formats.tool_calls == "plain",
        unsupported=model.unsupported_tools,
    )
    constraint = _constraint(body, tools, sampling.grammar)
    reasoning = read_reasoning_request(
        body.chat_template_kwargs, body.reasoning_effort, body.thinking_token_budget, model, ignored
    )
    prompt = await _prompt(body, model, tools, reasoning, ignored)
    # Not the text of the template, in which control tokens in the client's text are escaped.
    text = model.decode_tokens(prompt.tokens) if body.return_prompt_text or body.return_token_offsets else None
    tokens = read_token_output(
        body, model, [prompt.tokens], [text], logprobs=bool(body.logprobs), images=bool(prompt.images)
    )
    length = model.max_model_len - len(prompt.tokens) if body.length is None else body.length
    stopping = to_stop_conditions(body, model, length)
    reasoning_options = reasoning.for_prompt(prompt.text, model)
    use, calls = (tools.use, model.formats.tool_calls) if tools is not None else (None, None)
    grammar_field = constraint_field(body, tools)
    grammar = await compose_grammar(
        model,
        reasoning=reasoning_options,
        constraint=constraint,
        tools=use,
        format=calls or "plain",
        source_field=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
    )
    sampling = msgspec.structs.replace(sampling, grammar=grammar, opening=model.opening(use))
    request = GenerationRequest(
        id=random_id("chatcmpl-"),
        prompts=[prompt.tokens],
        sampling=sampling,
        stopping=stopping,
        choices=body.n or 1,
        candidates=body.n or 1,
        stop=stop,
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        space_special=bool(body.spaces_between_special_tokens),
        report_tokens=tokens.token_ids or bool(options.continuous_usage_stats),
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        logprob_tokens=tuple(body.logprob_token_ids or ()),
        prompt_logprobs=body.prompt_logprobs,
        beam_length_penalty=read_beam_search(body, sampling, ignored, images=bool(prompt.images)),
        images=tuple(await fetch_images(prompt.images, model.image_policy, tenant)) if prompt.images else (),
        output=OutputFormat(
            reasoning=model.formats.reasoning,
            reasoning_open=reasoning_options is not None and reasoning_options.opened,
            tool_calls=calls,
            tool_calls_only=use is not None and use.mode == "required",
            tool_schemas=tools.parameters if tools is not None else {},
        ),
        grammar_param=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
        use_cache=body.cache_prompt is not False,
        stream_interval=body.stream_interval or 1 if body.stream else 1,
        user=body.safety_identifier if body.user is None else body.user,
        priority=body.priority or 0,
    )
    writer = ChatWriter(
        # Not the id in the engine, which has to be unique among the requests of all clients.
        id=request.id if body.request_id is None else f"chatcmpl-{body.request_id}",
        created=int(time.time()),
        model=model,
        logprobs=bool(body.logprobs),
        include_usage=bool(options.include_usage),
        named_tool=tools is not None and tools.named,
        metadata=body.metadata,
        include_reasoning=body.include_reasoning is not False,
        echo=_echoed_text(body) if body.echo else "",
        tokens=tokens,
        prompt_text=text if body.return_prompt_text else None,
        counter=TokenCounter(len(prompt.tokens)) if options.continuous_usage_stats else None,
    )
    return PreparedRequest(request=request, writer=writer, model=model, stream=bool(body.stream))


async def _prompt(
    body: ChatRequest, model: ServedModel, tools: ToolRequest | None, reasoning: ReasoningRequest, ignored: list[str]
) -> ChatPrompt:
    template = require_template(model)
    if not body.truncate_sequence:
        check_message_count(len(body.messages), model, "messages")
    messages = await read_messages(
        body.messages, supports_images=model.supports_images, ignored=ignored, template=template
    )
    report_ignored_names(messages, template, ignored)
    renderer = PromptRenderer(
        model=model,
        template=template,
        tools=tools.use if tools is not None else None,
        kwargs=reasoning.kwargs,
        add_generation_prompt=adds_generation_prompt(body.add_generation_prompt, body.continue_final_message),
        continue_final_message=bool(body.continue_final_message),
        documents=_read_documents(body, template, ignored),
        add_special_tokens=bool(body.add_special_tokens),
        truncate=functools.partial(truncate_prompt, fields=body, model=model, max_tokens=body.length or 1),
    )
    return await fit_prompt(
        renderer,
        messages,
        max_tokens=body.length,
        truncate=bool(body.truncate_sequence),
        max_tokens_field=_length_field(body),
    )


def _read_documents(body: ChatRequest, template: Template, ignored: list[str]) -> list[dict[str, Any]] | None:
    """Return the documents for the template; they are reported in `ignored` if it does not read them."""
    if body.documents is None or "documents" in template.variables:
        return body.documents
    ignored.append("documents")
    return None


def _echoed_text(body: ChatRequest) -> str:
    """Return the text of the last message if it is the assistant's."""
    last = body.messages[-1]
    content = last.get("content") if last.get("role") == "assistant" else None
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part.get("type") == "text")
    return content or ""


def _constraint(body: ChatRequest, tools: ToolRequest | None, grammar: Grammar | None) -> Grammar | None:
    """Return the constraint on the text of the output; output that consists of tool calls has no text."""
    if tools is None:
        return grammar
    check_tools_with_constraint(body)
    return grammar if tools.use.mode == "auto" else None


def _length_field(body: ChatRequest) -> str:
    """Return the name of the field that has the maximum number of output tokens."""
    if body.n_predict is not None:
        return "n_predict"
    return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"


def _resolve_names(body: ChatRequest) -> ChatRequest:
    """Return the body with llama.cpp's names of fields resolved."""
    named: dict[str, Any] = {}
    if body.n_predict == 0:
        raise InvalidRequest("n_predict: expected at least 1, or -1.", param="n_predict")
    if body.n_predict is not None:
        named |= {"max_completion_tokens": None if body.n_predict < 0 else body.n_predict, "max_tokens": None}
    if body.n is None and body.n_cmpl is not None:
        named["n"] = body.n_cmpl
    if body.logprobs is None and body.n_probs:
        named |= {"logprobs": True, "top_logprobs": body.n_probs if body.top_logprobs is None else body.top_logprobs}
    if body.thinking_token_budget is None:
        for budget in (body.thinking_budget_tokens, body.reasoning_budget_tokens):
            if budget is not None:
                named["thinking_token_budget"] = budget
    return msgspec.structs.replace(body, **named) if named else body


def _reject_unsupported(body: ChatRequest) -> None:
    for name, reason in _REFUSED.items():
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: {reason}", param=name)
    for index, each in enumerate(body.modalities or ()):
        if each != "text":
            param = f"modalities[{index}]"
            raise InvalidRequest(f"{param}: only text is supported, not {each!r}.", param=param)
    if body.store:
        raise InvalidRequest("store: only /v1/responses stores its output.", param="store")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs requires logprobs: true.", param="top_logprobs")
    check_metadata(body.metadata or {})


def _report_ignored(body: ChatRequest, ignored: list[str]) -> None:
    """Append the names of fields that ask for something unsupported to `ignored`."""
    unsupported = {
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "verbosity": body.verbosity not in (None, "medium"),
        "prompt_cache_key": body.prompt_cache_key is not None,
        "metadata": bool(body.metadata) and bool(body.stream),
        "safety_identifier": body.safety_identifier is not None and body.user is not None,
    }
    ignored += [name for name, asked in unsupported.items() if asked]
