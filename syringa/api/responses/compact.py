"""`POST /v1/responses/compact`: replaces a conversation by its user messages and a summary of the rest."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from syringa.api.fields.constraints import compose_grammar
from syringa.api.fields.reasoning import read_reasoning_request
from syringa.api.fields.schema import doc
from syringa.api.models.served_model import Models
from syringa.api.output_writer import PreparedRequest
from syringa.api.responses.context import Cipher, Item, ResponseContext, encrypt_summary
from syringa.api.responses.items import new_id
from syringa.api.responses.prompt_builder import build_prompt, read_prompt_input
from syringa.api.responses.request import CompactRequest
from syringa.api.responses.response_object import ResponseUsage, to_response_usage
from syringa.errors import InvalidRequest
from syringa.events import Event, GenerationRequest, OutputFormat
from syringa.ids import random_number
from syringa.output.collect import CollectedGeneration
from syringa.prompt.images.loader import fetch_images
from syringa.types import SamplingParams, StopConditions

_MAX_SUMMARY_TOKENS = 1024
_SUMMARY_REQUEST = (
    "Summarize our conversation so far, so that you can go on with it when the rest is gone. Keep the goal, what was"
    " found out and decided, names and numbers, results of tools, and what is still to be done. Write only the summary."
)


class Compaction(msgspec.Struct, kw_only=True):
    """The response body: items that replace the conversation."""

    id: str
    object: Annotated[str, doc("`response.compaction`.", const="response.compaction")] = "response.compaction"
    created_at: Annotated[int, doc("Unix time in seconds.")]
    output: Annotated[list[dict[str, Any]], doc("The user messages, and one `compaction` item.")]
    usage: ResponseUsage


class CompactionWriter:
    """Writes the output of the model as an encrypted summary."""

    def __init__(self, *, id: str, kept: list[Item], cipher: Cipher) -> None:
        self.id = id
        self._kept, self._cipher = kept, cipher

    def write(self, event: Event) -> Sequence[msgspec.Struct]:
        """Return nothing: a compaction is not streamed."""
        return []

    def render(self, generation: CollectedGeneration) -> Compaction:
        summary = generation.choices[0].text.strip()
        item = {
            "type": "compaction",
            "id": new_id("cmp"),
            "encrypted_content": encrypt_summary(self._cipher, summary),
        }
        return Compaction(
            id=self.id,
            created_at=int(time.time()),
            output=[*self._kept, item],
            usage=to_response_usage(generation.usage),
        )


async def prepare_compaction(
    body: CompactRequest, models: Models, ignored: list[str], context: ResponseContext
) -> PreparedRequest:
    """Prepare a generation over the conversation that ends with a request for a summary.

    The oldest turns are dropped if the conversation does not fit into the context.
    """
    model = await models.find(body.model)
    _report_ignored(body, ignored)
    if body.input is None and not context.history:
        raise InvalidRequest("input: expected input items or a previous_response_id.", param="input")
    max_tokens = max(1, min(_MAX_SUMMARY_TOKENS, model.max_model_len // 4))
    reasoning = read_reasoning_request(None, "none", None, model, ignored=[])
    parsed = await read_prompt_input(body, model, context, ignored, truncate=True)
    prompt = await build_prompt(
        parsed.messages,
        model,
        instructions=body.instructions,
        reasoning=reasoning,
        max_tokens=max_tokens,
        truncate=True,
        final_message=_SUMMARY_REQUEST,
    )
    reasoning_options = reasoning.for_prompt(prompt.text, model)
    request = GenerationRequest(
        id=new_id("resp"),
        prompts=[prompt.tokens],
        sampling=SamplingParams(
            seed=random_number(63),
            temperature=0.0,
            grammar=await compose_grammar(
                model, reasoning=reasoning_options, tenant=context.tenant, cache_salt=body.cache_salt
            ),
        ),
        stopping=StopConditions(max_tokens=max_tokens, end_tokens=model.end_tokens),
        images=tuple(await fetch_images(prompt.images, model.image_policy, context.tenant)) if prompt.images else (),
        output=OutputFormat(
            reasoning=model.formats.reasoning, reasoning_open=reasoning_options is not None and reasoning_options.opened
        ),
        tenant=context.tenant,
        cache_salt=body.cache_salt,
    )
    everything = [*context.history, *parsed.items]
    kept = [each for each in everything if each.get("type") == "message" and each.get("role") == "user"]
    return PreparedRequest(
        request=request, writer=CompactionWriter(id=request.id, kept=kept, cipher=context.cipher), model=model
    )


def _report_ignored(body: CompactRequest, ignored: list[str]) -> None:
    unsupported = {
        "prompt_cache_key": body.prompt_cache_key is not None,
        "prompt_cache_retention": body.prompt_cache_retention is not None,
        "prompt_cache_options": body.prompt_cache_options is not None,
        "service_tier": body.service_tier not in (None, "auto", "default"),
    }
    ignored += [name for name, asked in unsupported.items() if asked]
