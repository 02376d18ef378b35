"""A stream of events folded into the whole that a body is rendered from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from syringa.events import (
    EndReason,
    Event,
    Finished,
    PromptScored,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    ToolCallDelta,
    ToolCallStart,
    Usage,
)


@dataclass
class CollectedCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class CollectedChoice:
    index: int
    text: str = ""
    reasoning: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    calls: list[CollectedCall] = field(default_factory=list)
    reason: EndReason = "stop"


@dataclass
class Generation:
    """Everything that the events said. Choices are in order of their index."""

    choices: list[CollectedChoice] = field(default_factory=list)
    prompts: list[PromptScored] = field(default_factory=list)
    usage: Usage = Usage(0, 0)  # noqa: RUF009 - frozen


def collect(events: Iterable[Event]) -> Generation:
    """What the events of a generation say in all."""
    generation = Generation()
    choices: dict[int, CollectedChoice] = {}
    texts: dict[int, list[str]] = {}
    thoughts: dict[int, list[str]] = {}
    for event in events:
        if isinstance(event, TextDelta):
            texts.setdefault(event.choice, []).append(event.text)
            choice = choices.setdefault(event.choice, CollectedChoice(event.choice))
            choice.tokens += event.tokens
        elif isinstance(event, Finished):
            choices.setdefault(event.choice, CollectedChoice(event.choice)).reason = event.reason
        elif isinstance(event, ToolCallDelta):
            choices[event.choice].calls[event.call].arguments += event.arguments
        elif isinstance(event, ToolCallStart):
            choice = choices.setdefault(event.choice, CollectedChoice(event.choice))
            choice.calls.append(CollectedCall(event.id, event.name))
        elif isinstance(event, ReasoningDelta):
            thoughts.setdefault(event.choice, []).append(event.text)
            choices.setdefault(event.choice, CollectedChoice(event.choice))
        elif isinstance(event, PromptScored):
            generation.prompts.append(event)
        else:
            generation.usage = event
    for index, choice in sorted(choices.items()):
        choice.text = "".join(texts.get(index, ()))
        choice.reasoning = "".join(thoughts.get(index, ()))
        generation.choices.append(choice)
    return generation
