"""From the fields that make a response's prompt to that prompt. The rest of the way is that of chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from syringa.api.chat.messages import Said
from syringa.api.chat.prompt import ChatPrompt, Rendering, fit, template_of
from syringa.api.decoding import convert
from syringa.api.fields.reasoning import Effort, ThinkingRequest, read_thinking
from syringa.api.models.served_model import ServedModel
from syringa.api.responses.context import Context, Item
from syringa.api.responses.input import read_input
from syringa.api.responses.messages import joined
from syringa.api.responses.response_object import ReasoningEcho
from syringa.api.responses.schemas import EFFORTS
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import ToolUse

_INSTRUCTIONS = ("system", "developer")
_OPEN_EFFORTS = ("none", "low", "medium", "high", "xhigh")


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class InputFields(Protocol):
    """What of a body makes its prompt."""

    @property
    def input(self) -> Any: ...
    @property
    def instructions(self) -> str | None: ...
    @property
    def previous_response_id(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """The prompt, and the new items that went into it."""

    prompt: ChatPrompt
    items: list[Item]


def read_reasoning(
    given: dict[str, Any] | None,
    kwargs: dict[str, Any] | None,
    budget: int | None,
    model: ServedModel,
    ignored: list[str],
    *,
    open_mode: bool,
) -> tuple[ThinkingRequest, ReasoningEcho]:
    """How much the model thinks, and what the response repeats of it. Summaries are not written here."""
    options = convert(given or {}, ReasoningOptions, path="reasoning", ignored=ignored)
    efforts = _OPEN_EFFORTS if open_mode else EFFORTS
    effort = _one_of(efforts, options.effort, "reasoning.effort")
    for name in ("summary", "generate_summary"):
        if _one_of(("auto", "concise", "detailed"), getattr(options, name), f"reasoning.{name}") is not None:
            ignored.append(f"reasoning.{name}")
    wanted: Effort | None = effort  # type: ignore[assignment] # `_one_of` has checked it
    thoughts = read_thinking(kwargs, wanted, budget, model, ignored, asked="reasoning.effort")
    return thoughts, ReasoningEcho(effort, options.summary or options.generate_summary)


def _one_of(known: Sequence[str], given: str | None, param: str) -> str | None:
    if given is not None and given not in known:
        raise InvalidRequest(f"{param}: expected {', '.join(known)}, not {given!r}.", param=param)
    return given


async def lower(
    body: InputFields,
    model: ServedModel,
    context: Context,
    ignored: list[str],
    *,
    tools: ToolUse | None = None,
    thoughts: ThinkingRequest,
    answer: int | None = None,
    truncate: bool = False,
    last: str | None = None,
) -> Lowered:
    """Reads the conversation and renders it. `last`: what the user is made to say at its end."""
    template = template_of(model)
    before = "previous_response_id" if body.previous_response_id is not None else "conversation"
    talk = await read_input(body.input, context, sees_images=model.sees_images, ignored=ignored, before=before)
    said = _instructed(talk.said, body.instructions)
    if last is not None:
        said = _asked(said, last)
    rendering = Rendering(model=model, template=template, tools=tools, kwargs=thoughts.kwargs)
    try:
        prompt = await fit(rendering, said, answer=answer, truncate=truncate, asked="max_output_tokens")
    except InvalidRequest as error:
        if error.param is None or not error.param.startswith("messages"):
            raise
        raise type(error)(error.message, param="input") from None
    return Lowered(prompt=prompt, items=talk.items)


def _instructed(said: list[Said], instructions: str | None) -> list[Said]:
    """Templates have one place for instructions: those of the request come before those of the conversation."""
    if instructions is None:
        return said
    first = Said({"role": "system", "content": instructions})
    if said[0].message["role"] in _INSTRUCTIONS:
        return [*joined([first, said[0]]), *said[1:]]
    return [first, *said]


def _asked(said: list[Said], text: str) -> list[Said]:
    question = Said({"role": "user", "content": text})
    if said[-1].message["role"] == "user":
        return [*said[:-1], *joined([said[-1], question])]
    return [*said, question]
