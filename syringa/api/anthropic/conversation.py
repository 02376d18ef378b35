"""The conversation of a message request as chat messages, and the position of its last `cache_control`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from syringa.api.anthropic.content import Part
from syringa.api.anthropic.request import CacheControl
from syringa.api.anthropic.tool_changes import ToolChange
from syringa.api.chat.content import Content
from syringa.api.chat.messages import PromptMessage
from syringa.prompt.chat.template import Message

_SYSTEM_TEXT = "<system_message>\n{}\n</system_message>"
_IMAGE_ELSEWHERE = "[image]"  # in the result of a tool, whose images are in the user message after it


class CacheMark(msgspec.Struct, frozen=True):
    """The end of the last block with `cache_control`: the turn, and how much of it comes before the end.

    `turn` is -1 for the system prompt, which precedes all turns.
    """

    control: CacheControl
    turn: int = -1
    parts: int = 0
    calls: int = 0


@dataclass
class Turn:
    """A message for the chat template: consecutive blocks of one role, or the result of one tool."""

    role: str
    parts: list[Part] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: tuple[str, str] | None = None  # id and name of the call, for the result of a tool

    def message(self, parts: int | None = None, calls: int | None = None) -> PromptMessage:
        """Return the message, or the beginning of it with so many parts and calls."""
        shown = self.parts[:parts]
        message: Message = {"role": self.role, "content": _content(shown)}
        if self.answers is not None:
            id, name = self.answers
            text = "\n".join(_IMAGE_ELSEWHERE if part.image else part.text for part in shown)
            return PromptMessage({"role": "tool", "content": text, "tool_call_id": id, "name": name})
        if self.reasoning:
            message["reasoning_content"] = "\n".join(self.reasoning)
        if self.calls[:calls]:
            message["tool_calls"] = self.calls[:calls]
            message["content"] = message["content"] or None
        return PromptMessage(message, [part.image for part in shown if part.image is not None])


class Conversation:
    """Collects the turns of a conversation in order."""

    def __init__(self) -> None:
        self.system: list[Part] = []
        self.turns: list[Turn] = []
        self.mark: CacheMark | None = None
        self.referenced_tools: set[str] = set()  # in results of tools that search for tools
        self.tool_changes: list[ToolChange] = []

    def turn(self, role: str) -> Turn:
        """Return the turn that blocks of a role are added to: the last one, if it has the role."""
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(Turn(role))
        return self.turns[-1]

    def add_system_text(self, text: str) -> None:
        """Add the text of a system message for a template that renders none after other messages.

        Before all turns, it belongs to the system prompt. Later it is marked as what it is in the user turn or the
        result of a tool before it, and after the assistant in a user turn, so that the prompt of a longer conversation
        begins with that of a shorter one.
        """
        if not self.turns:
            self.system.append(Part(text))
            return
        turn = self.turn("user") if self.turns[-1].role == "assistant" else self.turns[-1]
        turn.parts.append(Part(_SYSTEM_TEXT.format(text)))

    def prefix_mark(self, control: CacheControl | None) -> CacheMark | None:
        """Return the mark of the system prompt as far as it is known, or of the tools, which are rendered with it."""
        return CacheMark(control, parts=len(self.system)) if control is not None else None

    def mark_here(self, control: CacheControl | None) -> None:
        """Mark the end of what was added last, if there is a mark."""
        if control is None:
            return
        if self.turns:
            last = self.turns[-1]
            self.mark = CacheMark(control, len(self.turns) - 1, len(last.parts), len(last.calls))
        elif self.system:
            self.mark = self.prefix_mark(control)

    @property
    def continues(self) -> bool:
        """Whether the output continues the last message, which is the assistant's."""
        return bool(self.turns) and self.turns[-1].role == "assistant"

    @property
    def messages(self) -> list[PromptMessage]:
        """All messages for the chat template."""
        return [*self._instructions(), *(turn.message() for turn in self.turns)]

    def marked_messages(self, mark: CacheMark) -> list[PromptMessage]:
        """Return the messages up to a mark.

        After the system prompt comes a message that differs from every other: templates need one.
        """
        if mark.turn < 0:
            return [*self._instructions(mark.parts), PromptMessage({"role": "user", "content": "\0"})]
        before = [turn.message() for turn in self.turns[: mark.turn]]
        return [*self._instructions(), *before, self.turns[mark.turn].message(mark.parts, mark.calls)]

    def _instructions(self, parts: int | None = None) -> list[PromptMessage]:
        """Return the system prompt, or so many parts of it."""
        shown = self.system[:parts]
        return [PromptMessage({"role": "system", "content": "\n".join(part.text for part in shown)})] if shown else []


def _content(parts: list[Part]) -> Content:
    """Return content for the chat template: parts if there is an image, otherwise one text."""
    if any(part.image is not None for part in parts):
        return [{"type": "image"} if part.image is not None else {"type": "text", "text": part.text} for part in parts]
    return "\n".join(part.text for part in parts)
