"""Collect a stream of events into the complete result that a response body is rendered from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from syringa.events import (
    ChoiceEvent,
    ChoiceFinishReason,
    Event,
    PromptScored,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    TokenIds,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)


@dataclass
class CollectedToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class CollectedChoice:
    index: int
    text: str = ""
    reasoning: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    calls: list[CollectedToolCall] = field(default_factory=list)
    reason: ChoiceFinishReason = "stop"
    stop: str | int | None = None
    events: list[ChoiceEvent] = field(default_factory=list)  # in their order


@dataclass
class CollectedGeneration:
    """The complete result of a generation. Choices are sorted by index."""

    choices: list[CollectedChoice] = field(default_factory=list)
    prompts: list[PromptScored] = field(default_factory=list)
    usage: Usage = Usage(0, 0)  # noqa: RUF009 - frozen


def collect(events: Iterable[Event]) -> CollectedGeneration:
    """Return the complete result of a generation."""
    generation = CollectedGeneration()
    choices: dict[int, CollectedChoice] = {}
    for event in events:
        if isinstance(event, ChoiceEvent):
            choice = choices.get(event.choice)
            if choice is None:
                choice = choices[event.choice] = CollectedChoice(event.choice)
            choice.events.append(event)
        elif isinstance(event, PromptScored):
            generation.prompts.append(event)
        else:
            generation.usage = event
    for _, choice in sorted(choices.items()):
        _fold(choice)
        generation.choices.append(choice)
    return generation


def _fold(choice: CollectedChoice) -> None:
    texts: list[str] = []
    reasoning: list[str] = []
    for event in choice.events:
        if isinstance(event, TextDelta):
            texts.append(event.text)
            choice.tokens += event.tokens
        elif isinstance(event, ReasoningDelta):
            reasoning.append(event.text)
        elif isinstance(event, ToolCallDelta):
            choice.calls[event.call].arguments += event.arguments
        elif isinstance(event, ToolCallStart):
            choice.calls.append(CollectedToolCall(event.id, event.name))
        elif isinstance(event, TokenIds):
            choice.token_ids += event.tokens
        else:
            choice.reason, choice.stop = event.reason, event.stop
    choice.text, choice.reasoning = "".join(texts), "".join(reasoning)
