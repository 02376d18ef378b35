"""A generation as a response: event by event, or whole. Both come from the same items, so that they cannot differ."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from syringa.api.models.served_model import ServedModel
from syringa.api.responses.items import OutputItem
from syringa.api.responses.modes import OPEN_THOUGHT, THOUGHT
from syringa.api.responses.output_items import Growing, GrowingCall, GrowingCustomCall, GrowingMessage, GrowingThought
from syringa.api.responses.response_object import Echo, IncompleteDetails, Response, ResponseError, usage_of
from syringa.api.responses.stream import ItemEvent, ResponseEvent, StreamEvent
from syringa.errors import EngineOverloaded, RateLimited, RequestError, SyringaError
from syringa.events import (
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
from syringa.output.collect import Generation

_ENDED = ("completed", "incomplete", "failed", "cancelled")


@dataclass(frozen=True, kw_only=True)
class Style:
    """What a request says of the way its answer is written."""

    model: ServedModel
    custom: frozenset[str] = frozenset()  # the tools whose calls are shown as custom
    max_calls: int | None = None
    seal: Callable[[str], str] | None = None  # for thoughts that the client wants to carry
    open_mode: bool = False


class ResponseWriter:
    """Holds what the response repeats of the request, and the items that it has so far."""

    def __init__(self, *, id: str, created: int, echo: Echo, style: Style, prompt_tokens: int) -> None:
        self.id = id
        self.status = "in_progress"
        self._created, self._echo, self._style = created, echo, style
        self._usage = Usage(prompt_tokens, 0)
        self._number = 0
        self._closed: list[OutputItem] = []
        self._open: Growing | None = None
        self._pending: list[ScoredToken] = []  # scored tokens that belong to no item yet
        self._cut = False  # the answer was longer than allowed
        self._completed_at: int | None = None
        self._error: ResponseError | None = None

    @property
    def response(self) -> Response:
        """The response as it stands. A snapshot: it does not change with the writer."""
        return Response(
            **{name: getattr(self._echo, name) for name in Echo.__struct_fields__},
            id=self.id,
            created_at=self._created,
            completed_at=self._completed_at,
            status=self.status,
            error=self._error,
            incomplete_details=IncompleteDetails("max_output_tokens") if self.status == "incomplete" else None,
            output=self._closed + ([self._open.item()] if self._open is not None else []),
            usage=usage_of(self._usage),
        )

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items so far, as they are stored."""
        items: list[dict[str, Any]] = msgspec.to_builtins(self.response.output)
        return items

    def begin(self, *, queued: bool = False) -> list[StreamEvent]:
        """The events before the first item. `queued`: it waits for its turn, and says so first."""
        if queued:
            self.status = "queued"
            events = [self._event("created"), self._event("queued")]
            self.status = "in_progress"
            return [*events, self._event("in_progress")]
        return [self._event("created"), self._event("in_progress")]

    def write(self, event: Event) -> list[StreamEvent]:
        """The events that one of the generation becomes. A response that has ended says no more."""
        if self.status in _ENDED:
            return []
        if isinstance(event, TextDelta):
            return self._text(event)
        if isinstance(event, ReasoningDelta):
            thought = self._open if isinstance(self._open, GrowingThought) else None
            return thought.add(event.text) if thought is not None else self._think(event.text)
        if isinstance(event, ToolCallStart):
            return self._call(event)
        if isinstance(event, ToolCallDelta):
            call = self._open if isinstance(self._open, GrowingCall) else None
            return call.add(event.arguments) if call is not None else []
        if isinstance(event, Finished):
            return self._finish(event)
        if isinstance(event, PromptScored):
            return []  # responses score no prompts
        return self._complete(event)

    def around_text(self) -> None:
        return None

    def render(self, generation: Generation) -> Response:
        """The whole response. Where it was streamed already, that one."""
        for choice in generation.choices[:1]:
            for event in choice.events:
                self.write(event)
        self.write(generation.usage)
        return self.response

    def spend(self, usage: Usage) -> None:
        """What it has used, if it does not come to its end."""
        self._usage = usage

    def fail(self, error: Exception) -> list[StreamEvent]:
        """Ends a response that cannot go on. What the client is told of the cause is what any endpoint would tell."""
        if self.status in _ENDED:
            return []
        closing = self._close("incomplete")
        self._error, self.status = _told(error), "failed"
        return [*closing, self._event("failed")]

    def cancel(self) -> Response:
        """Ends a response that is no longer wanted, with what it has."""
        if self.status not in _ENDED:
            self._close("incomplete")
            self.status = "cancelled"
        return self.response

    def _text(self, event: TextDelta) -> list[StreamEvent]:
        message = self._open if isinstance(self._open, GrowingMessage) else None
        if message is None:
            self._pending += event.tokens
            if not event.text:
                return []  # the score of a token without text, which is no reason for a message
            tokens, self._pending = self._pending, []
            message = GrowingMessage(self._place, self._next, self._style.model)
            return [*self._begin(message), *message.add(event.text, tokens)]
        return message.add(event.text, event.tokens)

    def _think(self, text: str) -> list[StreamEvent]:
        name = OPEN_THOUGHT if self._style.open_mode else THOUGHT
        thought = GrowingThought(self._place, self._next, name, self._style.seal)
        return [*self._begin(thought), *thought.add(text)]

    def _call(self, event: ToolCallStart) -> list[StreamEvent]:
        if self._style.max_calls is not None and event.call >= self._style.max_calls:
            return self._close("completed")
        kind = GrowingCustomCall if event.name in self._style.custom else GrowingCall
        return self._begin(kind(self._place, self._next, event))

    @property
    def _place(self) -> int:
        """Of the next item in the output."""
        return len(self._closed) + (self._open is not None)

    def _begin(self, item: Growing) -> list[StreamEvent]:
        closing = self._close("completed")
        self._open = item
        return [*closing, *item.begin()]

    def _close(self, status: str) -> list[StreamEvent]:
        if self._open is None:
            return []
        item, self._open = self._open, None
        events = item.end(status)
        done = events[-1]
        assert isinstance(done, ItemEvent)
        self._closed.append(done.item)
        return events

    def _finish(self, event: Finished) -> list[StreamEvent]:
        self._cut = event.reason == "length"
        events: list[StreamEvent] = []
        if not self._closed and self._open is None:
            # Nothing was said: a message without text says so, where a client looks for one.
            message = GrowingMessage(0, self._next, self._style.model)
            events = self._begin(message)
            events += message.add("", self._pending) if self._pending else []
        return events + self._close("incomplete" if self._cut else "completed")

    def _complete(self, usage: Usage) -> list[StreamEvent]:
        self._usage = usage
        self.status = "incomplete" if self._cut else "completed"
        self._completed_at = None if self._cut else int(time.time())
        return [self._event(self.status)]

    def _event(self, name: str) -> StreamEvent:
        return ResponseEvent(type=f"response.{name}", sequence_number=self._next(), response=self.response)

    def _next(self) -> int:
        number, self._number = self._number, self._number + 1
        return number


def _told(error: Exception) -> ResponseError:
    """OpenAI's code for an error, of those that a failed response may have."""
    if not isinstance(error, SyringaError):
        return ResponseError("server_error", "The server failed on this request.")
    if isinstance(error, RateLimited | EngineOverloaded):
        return ResponseError("rate_limit_exceeded", error.message)
    if isinstance(error, RequestError):
        return ResponseError("invalid_prompt", error.message)
    return ResponseError("server_error", error.message)
