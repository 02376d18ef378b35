"""The generation request of a response, from its validated fields and its prompt."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from syringa.api.chat.prompt import ChatPrompt
from syringa.api.fields.constraints import (
    check_tools_with_constraint,
    compose_grammar,
    constraint_name,
    constraint_path,
)
from syringa.api.fields.reasoning import ReasoningRequest
from syringa.api.fields.sampling import read_stop, to_stop_conditions
from syringa.api.models.served_model import ServedModel
from syringa.api.responses.items import new_id
from syringa.api.responses.mcp.tools import McpTools
from syringa.api.responses.request import ResponseRequest
from syringa.api.responses.response_object import ReasoningEcho
from syringa.api.responses.text import TextFormat
from syringa.api.responses.tools import ResponseTools
from syringa.errors import InvalidRequest
from syringa.events import GenerationRequest, OutputFormat
from syringa.prompt.chat.tools import ToolUse
from syringa.prompt.images.loader import fetch_images
from syringa.types import Grammar, Image, SamplingParams

_INCLUDE_LOGPROBS = "message.output_text.logprobs"


@dataclass(frozen=True, kw_only=True)
class ParsedFields:
    """The validated fields of a body."""

    include: set[str]
    sampling: SamplingParams
    text: TextFormat
    tools: ResponseTools
    mcp: McpTools
    reasoning: ReasoningRequest
    reasoning_echo: ReasoningEcho

    @property
    def tool_use(self) -> ToolUse | None:
        return self.tools.request.use if self.tools.request is not None else None


async def build_generation_request(
    body: ResponseRequest,
    model: ServedModel,
    fields: ParsedFields,
    prompt: ChatPrompt,
    tenant: str,
    images: tuple[Image, ...] | None = None,
) -> GenerationRequest:
    """Return the request with its grammar and images. `images`: those of the prompt, if they were fetched before."""
    if images is None:
        images = tuple(await fetch_images(prompt.images, model.image_policy, tenant)) if prompt.images else ()
    remaining = model.max_model_len - len(prompt.tokens)
    stopping = to_stop_conditions(body, model, remaining if body.max_output_tokens is None else body.max_output_tokens)
    reasoning_options = fields.reasoning.for_prompt(prompt.text, model)
    calls = model.formats.tool_calls if fields.tool_use is not None else None
    grammar_field = "tools" if fields.tool_use is not None else "text.format.schema"
    if fields.tool_use is None and fields.sampling.grammar is not None:
        grammar_field = constraint_path(body)
    unenforced: list[str] = []
    grammar = await compose_grammar(
        model,
        reasoning=reasoning_options,
        constraint=_constraint(body, fields),
        tools=fields.tool_use,
        format=calls or "plain",
        source_field=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
        unenforced=unenforced,
    )
    fields.tools.mark_unenforced(unenforced)
    scored = _INCLUDE_LOGPROBS in fields.include or bool(body.top_logprobs)
    return GenerationRequest(
        id=new_id("resp"),
        prompts=[prompt.tokens],
        sampling=msgspec.structs.replace(fields.sampling, grammar=grammar, opening=model.opening(fields.tool_use)),
        stopping=stopping,
        stop=read_stop(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        show_special=body.skip_special_tokens is False,
        space_special=bool(body.spaces_between_special_tokens),
        logprobs=body.top_logprobs or 0 if scored else None,
        images=images,
        output=OutputFormat(
            reasoning=model.formats.reasoning,
            reasoning_open=reasoning_options is not None and reasoning_options.opened,
            tool_calls=calls,
            tool_schemas=fields.tools.request.parameters if fields.tools.request is not None else {},
        ),
        grammar_param=grammar_field,
        tenant=tenant,
        cache_salt=body.cache_salt,
        use_cache=body.cache_prompt is not False,
        user=body.safety_identifier if body.user is None else body.user,
        priority=body.priority or 0,
    )


def _constraint(body: ResponseRequest, fields: ParsedFields) -> Grammar | None:
    """Return the constraint on the text of the output; output that consists of tool calls has no text."""
    grammar = fields.text.grammar
    if fields.sampling.grammar is not None:
        name = constraint_name(body)
        if grammar is not None:
            raise InvalidRequest(f"{name} and text.format cannot be combined.", param=name)
        grammar = fields.sampling.grammar
    if fields.tool_use is None:
        return grammar
    check_tools_with_constraint(body)
    return grammar if fields.tool_use.mode == "auto" else None
