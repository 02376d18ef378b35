"""`/v1/chat/completions`: the wire type, and the way from a body to a generation."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.chat.messages import MessagesField, read_messages
from syringa.api.chat.prompt import ChatPrompt, Rendering, fit, name_unread, template_of
from syringa.api.chat.writer import ChatWriter
from syringa.api.decoding import Call
from syringa.api.fields.annotations import refused, says, unheeded
from syringa.api.fields.constraints import compose
from syringa.api.fields.defaults import with_defaults
from syringa.api.fields.metadata import MetadataField, check_metadata
from syringa.api.fields.reasoning import Effort, ThinkingRequest, read_thinking
from syringa.api.fields.sampling import (
    MAX_COUNT,
    Count,
    SamplingFields,
    constraint_field,
    to_sampling,
    to_stop,
    to_stopping,
)
from syringa.api.fields.stream_options import StreamOptionsField, read_stream_options
from syringa.api.fields.tools import ToolChoiceField, ToolRequest, ToolsField, read_tools
from syringa.api.models.served_model import Models, ServedModel
from syringa.errors import InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.ids import fresh_id
from syringa.prompt.images.images import fetch_images
from syringa.types import Grammar

Length = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
_REFUSED = {
    "audio": "Audio is not served here.",
    "prediction": "Predicted outputs are not served here.",
    "web_search_options": "This server does not search the web.",
    "moderation": "This server does not moderate.",
    "functions": "OpenAI has replaced it: use `tools`.",
    "function_call": "OpenAI has replaced it: use `tool_choice`.",
}


def _never(name: str) -> Meta:
    return refused(_REFUSED[name], type="null")


class ChatRequest(SamplingFields, kw_only=True):
    """The body of `POST /v1/chat/completions` and `POST /api/v2/chat/completions`."""

    messages: Annotated[MessagesField, says("The conversation: system, developer, user, assistant and tool messages.")]
    model: Annotated[
        str | None, says("An id from `/v1/models`, an alias, or `default`; absent: the default model.")
    ] = None
    max_completion_tokens: Annotated[
        Length | None, says("Tokens to generate at most, thoughts among them; absent: what the context leaves.")
    ] = None
    max_tokens: Annotated[Length | None, says("The same, where `max_completion_tokens` is absent.")] = None
    stream: Annotated[bool | None, says("Answer in server-sent events.", False)] = None
    stream_options: StreamOptionsField = None
    logprobs: Annotated[bool | None, says("The log-probabilities of the answer's tokens.", False)] = None
    top_logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=20)] | None, says("With this many alternatives per token; needs `logprobs`.", 0)
    ] = None
    tools: Annotated[ToolsField, says("Functions that the model may call; not with `grammar`.")] = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: Annotated[bool | None, says("Whether several calls may be made at once.", True)] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        says("More for the model's chat template. `thinking` or `enable_thinking` false: no thought."),
    ] = None
    reasoning_effort: Annotated[
        Effort | None, says("`none`: no thought; else told to the template, or where it has no word for it, a budget.")
    ] = None
    thinking_token_budget: Annotated[Count | None, says("Tokens after which a thought is closed.")] = None
    add_generation_prompt: Annotated[
        bool | None, says("Begin the assistant's turn; absent: true, unless the last message is continued.")
    ] = None
    continue_final_message: Annotated[bool | None, says("Go on with the last message, which is left open.", False)] = (
        None
    )
    user: Annotated[str | None, says("Kept with the usage record.")] = None
    safety_identifier: Annotated[
        Annotated[str, Meta(max_length=64)] | None, says("Kept with the usage record, where `user` is absent.")
    ] = None
    metadata: Annotated[
        MetadataField,
        says("Up to 16 pairs, sent back in the body; ignored in a stream."),
    ] = None
    store: Annotated[
        Annotated[bool, Meta(extra_json_schema={"const": False})] | None,
        refused("Refused where true: only `/v1/responses` stores what it answers."),
    ] = None
    modalities: Annotated[
        Annotated[list[Any], Meta(extra_json_schema={"items": {"const": "text"}})] | None,
        says("Only `text` is served; audio is refused."),
    ] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
        unheeded("There is one tier; any but `auto` and `default` is named as ignored."),
    ] = None
    verbosity: Annotated[Literal["low", "medium", "high"] | None, unheeded("Any but `medium` is named as ignored.")] = (
        None
    )
    prompt_cache_key: Annotated[str | None, unheeded("Prefixes are found by their content, without a key.")] = None
    audio: Annotated[Any, _never("audio")] = None
    prediction: Annotated[Any, _never("prediction")] = None
    web_search_options: Annotated[Any, _never("web_search_options")] = None
    moderation: Annotated[Any, _never("moderation")] = None
    functions: Annotated[Any, _never("functions")] = None
    function_call: Annotated[Any, _never("function_call")] = None

    @property
    def length(self) -> int | None:
        """How long the answer may be."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


async def to_generation(body: ChatRequest, models: Models, ignored: list[str], tenant: str = "") -> Call:
    """Checks what types alone cannot say, renders, tokenizes and fetches images. Nothing has run when this raises."""
    model = await models.find(body.model)
    body = with_defaults(body, model)
    _refuse(body)
    _name_unheeded(body, ignored)
    options = read_stream_options(body.stream_options, stream=bool(body.stream), ignored=ignored)
    stop = to_stop(body.stop)
    sampling = await to_sampling(body, model, ignored)
    tools = await read_tools(
        body.tools,
        body.tool_choice,
        ignored,
        parallel=body.parallel_tool_calls is not False,
        hold=model.dialect.calls == "plain",
    )
    constraint = _constraint(body, tools, sampling.grammar)
    thoughts = read_thinking(
        body.chat_template_kwargs, body.reasoning_effort, body.thinking_token_budget, model, ignored
    )
    prompt = await _prompt(body, model, tools, thoughts, ignored)
    length = model.max_model_len - len(prompt.tokens) if body.length is None else body.length
    stopping = to_stopping(body, model, length)
    thinking = thoughts.begin(prompt.text, model)
    use, calls = (tools.use, model.dialect.calls) if tools is not None else (None, None)
    bound = constraint_field(body, tools)
    grammar = await compose(
        model, thinking=thinking, constraint=constraint, tools=use, format=calls or "plain", asked=bound
    )
    request = GenerationRequest(
        id=fresh_id("chatcmpl-"),
        prompts=[prompt.tokens],
        sampling=msgspec.structs.replace(sampling, grammar=grammar, opening=model.opening(use)),
        stopping=stopping,
        choices=body.n or 1,
        candidates=body.n or 1,
        stop=stop,
        logprobs=body.top_logprobs or 0 if body.logprobs else None,
        images=tuple(await fetch_images(prompt.images, model.image_policy)) if prompt.images else (),
        output=OutputFormat(
            thought=model.dialect.thought,
            thinking=thinking is not None and thinking.opened,
            calls=calls,
            only_calls=use is not None and use.mode == "required",
            parameters=tools.parameters if tools is not None else {},
        ),
        constraint=bound,
        tenant=tenant,
        user=body.safety_identifier if body.user is None else body.user,
    )
    writer = ChatWriter(
        id=request.id,
        created=int(time.time()),
        model=model,
        logprobs=bool(body.logprobs),
        include_usage=bool(options.include_usage),
        named_tool=tools is not None and tools.named,
        metadata=body.metadata,
    )
    return Call(request=request, writer=writer, model=model, stream=bool(body.stream))


async def _prompt(
    body: ChatRequest, model: ServedModel, tools: ToolRequest | None, thoughts: ThinkingRequest, ignored: list[str]
) -> ChatPrompt:
    template = template_of(model)
    said = await read_messages(body.messages, sees_images=model.sees_images, ignored=ignored)
    name_unread(said, template, ignored)
    begins = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    rendering = Rendering(
        model=model,
        template=template,
        tools=tools.use if tools is not None else None,
        kwargs=thoughts.kwargs,
        add_generation_prompt=begins,
        continue_final_message=bool(body.continue_final_message),
    )
    asked = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return await fit(rendering, said, answer=body.length, truncate=bool(body.truncate_sequence), asked=asked)


def _constraint(body: ChatRequest, tools: ToolRequest | None, grammar: Grammar | None) -> Grammar | None:
    """What the text of the answer is held to: an answer that has to be calls has no text."""
    if tools is None:
        return grammar
    if body.grammar is not None:
        raise InvalidRequest("grammar and tools cannot both constrain the answer.", param="grammar")
    return grammar if tools.use.mode == "auto" else None


def _refuse(body: ChatRequest) -> None:
    for name, reason in _REFUSED.items():
        if getattr(body, name) is not None:
            raise InvalidRequest(f"{name}: {reason}", param=name)
    for index, each in enumerate(body.modalities or ()):
        if each != "text":
            param = f"modalities[{index}]"
            raise InvalidRequest(f"{param}: only text is served here, not {each!r}.", param=param)
    if body.store:
        raise InvalidRequest("store: only /v1/responses stores what it answers.", param="store")
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    check_metadata(body.metadata or {})


def _name_unheeded(body: ChatRequest, ignored: list[str]) -> None:
    """Adds what asks for something that is not done here to `ignored`."""
    asks = {
        "service_tier": body.service_tier not in (None, "auto", "default"),
        "verbosity": body.verbosity not in (None, "medium"),
        "prompt_cache_key": body.prompt_cache_key is not None,
        "metadata": bool(body.metadata) and bool(body.stream),
        "safety_identifier": body.safety_identifier is not None and body.user is not None,
    }
    ignored += [name for name, asked in asks.items() if asked]
