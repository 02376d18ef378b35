"""`POST /v1/responses/compact`: a conversation made short. What the user said stays, the rest becomes a summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from syringa.api.decoding import Call
from syringa.api.fields.annotations import says
from syringa.api.fields.constraints import compose
from syringa.api.fields.reasoning import read_thinking
from syringa.api.models.served_model import Models
from syringa.api.responses.context import Context, Item, Seal
from syringa.api.responses.items import new_id
from syringa.api.responses.lowering import lower
from syringa.api.responses.request import CompactRequest
from syringa.api.responses.response_object import ResponseUsage, usage_of
from syringa.api.responses.sealing import seal_summary
from syringa.errors import InvalidRequest
from syringa.events import Event, GenerationRequest, OutputFormat
from syringa.ids import random_number
from syringa.output.collect import Generation
from syringa.prompt.images.images import fetch_images
from syringa.types import Sampling, Stopping

_MOST_TOKENS = 1024
_WISH = (
    "Summarize our conversation so far, so that you can go on with it when the rest is gone. Keep the goal, what was"
    " found out and decided, names and numbers, results of tools, and what is still to be done. Write only the summary."
)


class Compaction(msgspec.Struct, kw_only=True):
    """The body: items to go on from, in the place of those that they stand for."""

    id: str
    object: Annotated[str, says("`response.compaction`.", const="response.compaction")] = "response.compaction"
    created_at: Annotated[int, says("Unix time, in seconds.")]
    output: Annotated[list[dict[str, Any]], says("What the user said, and one `compaction` item.")]
    usage: ResponseUsage


class CompactionWriter:
    """Takes what the model writes as the summary."""

    def __init__(self, *, id: str, kept: list[Item], seal: Seal) -> None:
        self.id = id
        self._kept, self._seal = kept, seal

    def write(self, event: Event) -> Sequence[msgspec.Struct]:
        """A compaction is not streamed."""
        return []

    def around_text(self) -> None:
        return None

    def render(self, generation: Generation) -> Compaction:
        summary = generation.choices[0].text.strip()
        item = {
            "type": "compaction",
            "id": new_id("cmp"),
            "encrypted_content": seal_summary(self._seal, summary),
        }
        return Compaction(
            id=self.id, created_at=int(time.time()), output=[*self._kept, item], usage=usage_of(generation.usage)
        )


async def prepare_compaction(body: CompactRequest, models: Models, ignored: list[str], context: Context) -> Call:
    """A pass of the model over the conversation, which ends in the wish for a summary. The oldest turns go where it
    would not fit: it is the long conversations that are compacted."""
    model = await models.find(body.model)
    _name_unheeded(body, ignored)
    if body.input is None and not context.history:
        raise InvalidRequest("input: expected items, or a previous_response_id.", param="input")
    room = max(1, min(_MOST_TOKENS, model.max_model_len // 4))
    thoughts = read_thinking(None, "none", None, model, ignored=[])
    lowered = await lower(body, model, context, ignored, thoughts=thoughts, answer=room, truncate=True, last=_WISH)
    prompt = lowered.prompt
    thinking = thoughts.begin(prompt.text, model)
    request = GenerationRequest(
        id=new_id("resp"),
        prompts=[prompt.tokens],
        sampling=Sampling(seed=random_number(63), temperature=0.0, grammar=await compose(model, thinking=thinking)),
        stopping=Stopping(max_tokens=room, end_tokens=model.end_tokens),
        images=tuple(await fetch_images(prompt.images, model.image_policy)) if prompt.images else (),
        output=OutputFormat(thought=model.dialect.thought, thinking=thinking is not None and thinking.opened),
        tenant=context.tenant,
    )
    everything = [*context.history, *lowered.items]
    kept = [each for each in everything if each.get("type") == "message" and each.get("role") == "user"]
    return Call(request=request, writer=CompactionWriter(id=request.id, kept=kept, seal=context.seal), model=model)


def _name_unheeded(body: CompactRequest, ignored: list[str]) -> None:
    asks = {
        "prompt_cache_key": body.prompt_cache_key is not None,
        "prompt_cache_retention": body.prompt_cache_retention is not None,
        "prompt_cache_options": body.prompt_cache_options is not None,
        "service_tier": body.service_tier not in (None, "auto", "default"),
    }
    ignored += [name for name, asked in asks.items() if asked]
