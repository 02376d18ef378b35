"""What a response says: messages, thoughts and calls, in the wire's shape."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType

from syringa.api.fields.annotations import says
from syringa.api.models.served_model import ServedModel
from syringa.events import ScoredToken
from syringa.ids import fresh_id

Status = Annotated[str, says("How far it has come.", enum=["in_progress", "completed", "incomplete"])]


class TopLogprob(msgspec.Struct):
    token: Annotated[str, says("Its text; bytes that are no whole character are spelt out.")]
    logprob: float
    bytes: Annotated[list[int], says("Empty for a token that marks structure and has no text.")]


class Logprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: Annotated[list[Logprob], says("Empty where they were not asked for.")] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: Status
    role: Annotated[str, says("`assistant`.", const="assistant")] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought."""

    id: str
    status: Status
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: Annotated[
        str | UnsetType, says("The thought, sealed, for a client that sends it back and stores nothing here.")
    ] = UNSET


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    status: Status
    call_id: Annotated[str, says("What the output of the call has to name.")]
    name: str
    arguments: Annotated[str, says("JSON text.")]


class CustomToolCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    id: str
    status: Status
    call_id: Annotated[str, says("What the output of the call has to name.")]
    name: str
    input: str


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomToolCallItem
Part = OutputText | ReasoningText


def new_id(prefix: str) -> str:
    return fresh_id(f"{prefix}_")


def logprobs(tokens: Iterable[ScoredToken], model: ServedModel) -> list[Logprob]:
    """Tokens with their scores. These schemas want bytes where chat has null."""
    special, tokenizer = model.tokenizer.special_ids, model.tokenizer

    def raw(token: int) -> list[int]:
        return [] if token in special else list(tokenizer.token_bytes(token))

    found = []
    for scores in (each.scores for each in tokens):
        top = [TopLogprob(model.token_text(token), logprob, raw(token)) for token, logprob in scores.top]
        found.append(Logprob(model.token_text(scores.token), scores.logprob, raw(scores.token), top))
    return found
