"""The items of a response while they grow, and the events by which a client hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from msgspec import UNSET

from syringa.api.models.served_model import ServedModel
from syringa.api.responses.custom_input import CustomInput
from syringa.api.responses.items import (
    CustomToolCallItem,
    FunctionCallItem,
    Logprob,
    OutputItem,
    OutputMessage,
    OutputText,
    Part,
    ReasoningItem,
    ReasoningText,
    logprobs,
    new_id,
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
from syringa.events import ScoredToken, ToolCallStart

Number = Callable[[], int]
"""The number of the next event."""


class Growing(Protocol):
    """An item that the model is writing. `index` is its place in the output."""

    id: str
    index: int

    def item(self, status: str = "in_progress") -> OutputItem:
        """The item as it stands."""
        ...

    def begin(self) -> list[StreamEvent]: ...

    def end(self, status: str) -> list[StreamEvent]:
        """The last of them has the item as it stays."""
        ...


class _Item:
    """What all of them have."""

    prefix = ""

    def __init__(self, index: int, number: Number) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self._number = number
        self._texts: list[str] = []

    @property
    def _text(self) -> str:
        return "".join(self._texts)

    def _added(self, item: OutputItem) -> StreamEvent:
        return ItemEvent(
            type="response.output_item.added", sequence_number=self._number(), output_index=self.index, item=item
        )

    def _done(self, item: OutputItem) -> StreamEvent:
        return ItemEvent(
            type="response.output_item.done", sequence_number=self._number(), output_index=self.index, item=item
        )

    def _part(self, state: str, part: Part) -> StreamEvent:
        return PartEvent(
            type=f"response.content_part.{state}",
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self.index,
            content_index=0,
            part=part,
        )


class GrowingMessage(_Item):
    prefix = "msg"

    def __init__(self, index: int, number: Number, model: ServedModel) -> None:
        super().__init__(index, number)
        self._model = model
        self._scores: list[Logprob] = []

    def item(self, status: str = "in_progress") -> OutputMessage:
        return OutputMessage(id=self.id, status=status, content=[OutputText(self._text, [], self._scores[:])])

    def begin(self) -> list[StreamEvent]:
        empty = OutputMessage(id=self.id, status="in_progress", content=[])
        return [self._added(empty), self._part("added", OutputText(""))]

    def add(self, text: str, tokens: Iterable[ScoredToken]) -> list[StreamEvent]:
        scores = logprobs(tokens, self._model) if tokens else []
        self._texts.append(text)
        self._scores += scores
        return [
            TextDeltaEvent(
                type="response.output_text.delta",
                sequence_number=self._number(),
                item_id=self.id,
                output_index=self.index,
                content_index=0,
                delta=text,
                logprobs=scores,
            )
        ]

    def end(self, status: str) -> list[StreamEvent]:
        item = self.item(status)
        done = TextDoneEvent(
            type="response.output_text.done",
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self.index,
            content_index=0,
            text=item.content[0].text,
            logprobs=item.content[0].logprobs,
        )
        return [done, self._part("done", item.content[0]), self._done(item)]


class GrowingThought(_Item):
    prefix = "rs"

    def __init__(self, index: int, number: Number, name: str, seal: Callable[[str], str] | None) -> None:
        """`name`: what events call it. `seal`: where the client wants a copy that it can send back."""
        super().__init__(index, number)
        self._name, self._seal = name, seal

    def item(self, status: str = "in_progress") -> ReasoningItem:
        return ReasoningItem(id=self.id, status=status, content=[ReasoningText(self._text)])

    def begin(self) -> list[StreamEvent]:
        empty = ReasoningItem(id=self.id, status="in_progress", content=[])
        return [self._added(empty), self._part("added", ReasoningText(""))]

    def add(self, text: str) -> list[StreamEvent]:
        self._texts.append(text)
        return [
            ReasoningDeltaEvent(
                type=f"response.{self._name}.delta",
                sequence_number=self._number(),
                item_id=self.id,
                output_index=self.index,
                content_index=0,
                delta=text,
            )
        ]

    def end(self, status: str) -> list[StreamEvent]:
        item = self.item(status)
        item.encrypted_content = self._seal(self._text) if self._seal is not None else UNSET
        done = ReasoningDoneEvent(
            type=f"response.{self._name}.done",
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self.index,
            content_index=0,
            text=self._text,
        )
        return [done, self._part("done", item.content[0]), self._done(item)]


class GrowingCall(_Item):
    prefix = "fc"

    def __init__(self, index: int, number: Number, start: ToolCallStart) -> None:
        super().__init__(index, number)
        self._call_id, self._called = start.id, start.name

    def item(self, status: str = "in_progress") -> OutputItem:
        return FunctionCallItem(
            id=self.id, status=status, call_id=self._call_id, name=self._called, arguments=self._text
        )

    def begin(self) -> list[StreamEvent]:
        return [self._added(self.item())]

    def add(self, arguments: str) -> list[StreamEvent]:
        self._texts.append(arguments)
        return [self._delta("function_call_arguments", arguments)]

    def end(self, status: str) -> list[StreamEvent]:
        done = ArgumentsDoneEvent(
            type="response.function_call_arguments.done",
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self.index,
            name=self._called,
            arguments=self._text,
        )
        return [done, self._done(self.item(status))]

    def _delta(self, name: str, text: str) -> StreamEvent:
        return CallDeltaEvent(
            type=f"response.{name}.delta",
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self.index,
            delta=text,
        )


class GrowingCustomCall(GrowingCall):
    """The model calls a function with one parameter; the client sees the text that is in it."""

    prefix = "ctc"

    def __init__(self, index: int, number: Number, start: ToolCallStart) -> None:
        super().__init__(index, number, start)
        self._input = CustomInput()

    def item(self, status: str = "in_progress") -> OutputItem:
        return CustomToolCallItem(id=self.id, status=status, call_id=self._call_id, name=self._called, input=self._text)

    def add(self, arguments: str) -> list[StreamEvent]:
        return self._more(self._input.feed(arguments))

    def end(self, status: str) -> list[StreamEvent]:
        events = self._more(self._input.flush())
        done = InputDoneEvent(
            type="response.custom_tool_call_input.done",
            sequence_number=self._number(),
            item_id=self.id,
            output_index=self.index,
            input=self._text,
        )
        return [*events, done, self._done(self.item(status))]

    def _more(self, text: str) -> list[StreamEvent]:
        if not text:
            return []
        self._texts.append(text)
        return [self._delta("custom_tool_call_input", text)]
