"""Builders of a response's output items, and the stream events for what they add."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from syringa.api.models.served_model import ServedModel
from syringa.api.responses.custom_input import CustomInputParser
from syringa.api.responses.items import (
    ContentPart,
    CustomToolCallItem,
    FunctionCallItem,
    Logprob,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ToolSearchCallItem,
    new_id,
    to_logprobs,
)
from syringa.api.responses.stream import (
    ArgumentsDoneEvent,
    CallDeltaEvent,
    InputDoneEvent,
    ItemEvent,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from syringa.api.responses.tool_names import ToolKey
from syringa.events import ScoredToken, ToolCallStart

NextSequenceNumber = Callable[[], int]
"""Returns the sequence number of the next event."""


class OutputItemBuilder(Protocol):
    """An output item that the model is writing. `index` is its index in the output."""

    id: str
    index: int

    def item(self, status: str = "in_progress") -> OutputItem:
        """Return the item so far."""
        ...

    def begin(self) -> list[StreamEvent]:
        """Return the opening events."""
        ...

    def end(self, status: str) -> list[StreamEvent]:
        """Return the closing events, the last of which has the final item."""
        ...


class _BaseBuilder:
    """Base of the builders."""

    prefix = ""

    def __init__(self, index: int, next_number: NextSequenceNumber) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self._next_number = next_number
        self._texts: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _item_added(self, item: OutputItem) -> StreamEvent:
        return ItemEvent(
            type="response.output_item.added", sequence_number=self._next_number(), output_index=self.index, item=item
        )

    def _item_done(self, item: OutputItem) -> StreamEvent:
        return ItemEvent(
            type="response.output_item.done", sequence_number=self._next_number(), output_index=self.index, item=item
        )

    def _part(self, state: str, part: ContentPart) -> StreamEvent:
        return PartEvent(
            type=f"response.content_part.{state}",
            sequence_number=self._next_number(),
            item_id=self.id,
            output_index=self.index,
            content_index=0,
            part=part,
        )


class MessageItemBuilder(_BaseBuilder):
    prefix = "msg"

    def __init__(self, index: int, next_number: NextSequenceNumber, model: ServedModel) -> None:
        super().__init__(index, next_number)
        self._model = model
        self._logprobs: list[Logprob] = []

    def item(self, status: str = "in_progress") -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[OutputText(self._text, [], self._logprobs[:])])

    def begin(self) -> list[StreamEvent]:
        empty = OutputMessage(id=self.id, status="in_progress", content=[])
        return [self._item_added(empty), self._part("added", OutputText(""))]

    def add(self, text: str, tokens: Iterable[ScoredToken]) -> list[StreamEvent]:
        logprobs = to_logprobs(tokens, self._model) if tokens else []
        self._texts.append(text)
        self._logprobs += logprobs
        return [
            TextDeltaEvent(
                type="response.output_text.delta",
                sequence_number=self._next_number(),
                item_id=self.id,
                output_index=self.index,
                content_index=0,
                delta=text,
                logprobs=logprobs,
            )
        ]

    def end(self, status: str) -> list[StreamEvent]:
        item = self.item(status)
        done = TextDoneEvent(
            type="response.output_text.done",
            sequence_number=self._next_number(),
            item_id=self.id,
            output_index=self.index,
            content_index=0,
            text=item.content[0].text,
            logprobs=item.content[0].logprobs,
        )
        return [done, self._part("done", item.content[0]), self._item_done(item)]


class ReasoningItemBuilder(_BaseBuilder):
    prefix = "rs"

    def __init__(
        self, index: int, next_number: NextSequenceNumber, name: str, encrypt: Callable[[str], str] | None
    ) -> None:
        """`name` is that of the events. `encrypt` is set if the client wants an encrypted copy to send back."""
        super().__init__(index, next_number)
        self._name, self._encrypt = name, encrypt

    def item(self, status: str = "in_progress") -> ReasoningItem:
        return ReasoningItem(id=self.id, status=status, content=[ReasoningText(self._text)])

    def begin(self) -> list[StreamEvent]:
        empty = ReasoningItem(id=self.id, status="in_progress", content=[])
        return [self._item_added(empty), self._part("added", ReasoningText(""))]

    def add(self, text: str) -> list[StreamEvent]:
        self._texts.append(text)
        return [
            ReasoningDeltaEvent(
                type=f"response.{self._name}.delta",
                sequence_number=self._next_number(),
                item_id=self.id,
                output_index=self.index,
                content_index=0,
                delta=text,
            )
        ]

    def end(self, status: str) -> list[StreamEvent]:
        item = self.item(status)
        item.encrypted_content = self._encrypt(self._text) if self._encrypt is not None else UNSET
        done = ReasoningDoneEvent(
            type=f"response.{self._name}.done",
            sequence_number=self._next_number(),
            item_id=self.id,
            output_index=self.index,
            content_index=0,
            text=self._text,
        )
        return [done, self._part("done", item.content[0]), self._item_done(item)]


class FunctionCallItemBuilder(_BaseBuilder):
    prefix = "fc"

    def __init__(self, index: int, next_number: NextSequenceNumber, start: ToolCallStart, key: ToolKey) -> None:
        """`key` is the tool that the model calls, as the client knows it."""
        super().__init__(index, next_number)
        self._call_id, self._name = start.id, key.name
        self._namespace = UNSET if key.namespace is None else key.namespace

    def item(self, status: str = "in_progress") -> OutputItem:
        return FunctionCallItem(
            id=self.id,
            status=status,
            call_id=self._call_id,
            name=self._name,
            namespace=self._namespace,
            arguments=self._text,
        )

    def begin(self) -> list[StreamEvent]:
        return [self._item_added(self.item())]

    def add(self, arguments: str) -> list[StreamEvent]:
        self._texts.append(arguments)
        return [self._delta("function_call_arguments", arguments)]

    def end(self, status: str) -> list[StreamEvent]:
        done = ArgumentsDoneEvent(
            type="response.function_call_arguments.done",
            sequence_number=self._next_number(),
            item_id=self.id,
            output_index=self.index,
            name=self._name,
            arguments=self._text,
        )
        return [done, self._item_done(self.item(status))]

    def _delta(self, name: str, text: str) -> StreamEvent:
        return CallDeltaEvent(
            type=f"response.{name}.delta",
            sequence_number=self._next_number(),
            item_id=self.id,
            output_index=self.index,
            delta=text,
        )


class CustomToolCallItemBuilder(FunctionCallItemBuilder):
    """A call of a function with one parameter, which the client sees as a call of a custom tool with that text."""

    prefix = "ctc"

    def __init__(self, index: int, next_number: NextSequenceNumber, start: ToolCallStart, key: ToolKey) -> None:
        super().__init__(index, next_number, start, key)
        self._input = CustomInputParser()

    def item(self, status: str = "in_progress") -> OutputItem:
        return CustomToolCallItem(
            id=self.id,
            status=status,
            call_id=self._call_id,
            name=self._name,
            namespace=self._namespace,
            input=self._text,
        )

    def add(self, arguments: str) -> list[StreamEvent]:
        return self._add_text(self._input.feed(arguments))

    def end(self, status: str) -> list[StreamEvent]:
        events = self._add_text(self._input.flush())
        done = InputDoneEvent(
            type="response.custom_tool_call_input.done",
            sequence_number=self._next_number(),
            item_id=self.id,
            output_index=self.index,
            input=self._text,
        )
        return [*events, done, self._item_done(self.item(status))]

    def _add_text(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        self._texts.append(text)
        return [self._delta("custom_tool_call_input", text)]


class ToolSearchCallItemBuilder(FunctionCallItemBuilder):
    """A call of the function that stands for the client's tool search. Its arguments are not streamed."""

    prefix = "tsc"

    def item(self, status: str = "in_progress") -> OutputItem:
        complete = status == "completed"
        arguments = _decode_arguments(self._text) if complete else {}
        return ToolSearchCallItem(id=self.id, status=status, call_id=self._call_id, arguments=arguments)

    def add(self, arguments: str) -> list[StreamEvent]:
        self._texts.append(arguments)
        return []

    def end(self, status: str) -> list[StreamEvent]:
        return [self._item_done(self.item(status))]


def _decode_arguments(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}
