"""The writer of messages: events become a message, or the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from syringa.api.anthropic.message import (
    AssistantMessage,
    Block,
    BlockDelta,
    BlockDeltaBody,
    BlockStart,
    BlockStop,
    MessageDelta,
    MessageDeltaBody,
    MessageStart,
    MessageStop,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from syringa.api.anthropic.token_counts import TokenCounts
from syringa.api.models.served_model import ServedModel
from syringa.api.output_writer import TextChunkEncoder
from syringa.events import Event, Finished, ReasoningDelta, TextDelta, ToolCallDelta, ToolCallStart, Usage
from syringa.output.collect import CollectedGeneration

Seal = Callable[[str], str]
"""Returns the signature of a thinking text."""


class MessageWriter:
    """Writes a generation as a message or as its stream.

    The events are those of one choice, with a `Usage` before the first token and one at the end.
    """

    def __init__(
        self,
        *,
        id: str,
        model: ServedModel,
        counts: TokenCounts,
        seal: Seal | None = None,
        show_thinking: bool = True,
        max_tokens: int = 0,
    ) -> None:
        """Without `seal`, thinking is left out. `max_tokens`: that of the request, which the context may not leave."""
        self._id, self._model, self._counts = id, model, counts
        self._seal, self._show_thinking, self._max_tokens = seal, show_thinking, max_tokens
        self._started = False
        self._index = -1  # of the current block
        self._open: type[Block] | None = None
        self._thinking: list[str] = []  # texts of the open thinking block
        self._finished: Finished | None = None
        self._text_chunk = TextChunkEncoder(
            lambda index, text: BlockDelta(index=index, delta=BlockDeltaBody(type="text_delta", text=text))
        )

    def write(self, event: Event) -> Sequence[msgspec.Struct | msgspec.Raw]:
        """Return the stream events for one event."""
        if isinstance(event, TextDelta):
            if not event.text:
                return ()
            if self._open is TextBlock:
                return (self._text_chunk(self._index, event.text),)
            return [*self._begin(TextBlock(text="")), self._text_chunk(self._index, event.text)]
        if isinstance(event, ReasoningDelta):
            return self._write_thinking(event.text)
        if isinstance(event, ToolCallStart):
            return self._begin(ToolUseBlock(id=_call_id(event.id), name=event.name, input={}))
        if isinstance(event, ToolCallDelta):
            return [self._delta(type="input_json_delta", partial_json=event.arguments)]
        if isinstance(event, Finished):
            self._finished = event
            return self._end_block()
        if isinstance(event, Usage):
            return self._write_usage(event)
        return ()

    def render(self, generation: CollectedGeneration) -> AssistantMessage:
        """Return the whole message."""
        content: list[Block] = []
        pieces: list[list[str]] = []  # of the text, thinking or input of each block

        def add(kind: type[Block], text: str) -> None:
            if not content or type(content[-1]) is not kind:
                content.append(TextBlock(text="") if kind is TextBlock else ThinkingBlock(thinking="", signature=""))
                pieces.append([])
            pieces[-1].append(text)

        (choice,) = generation.choices
        for event in choice.events:
            if isinstance(event, TextDelta) and event.text:
                add(TextBlock, event.text)
            elif isinstance(event, ReasoningDelta) and self._seal is not None:
                add(ThinkingBlock, event.text)
            elif isinstance(event, ToolCallStart):
                content.append(ToolUseBlock(id=_call_id(event.id), name=event.name, input={}))
                pieces.append([])
            elif isinstance(event, ToolCallDelta):
                pieces[-1].append(event.arguments)
            elif isinstance(event, Finished):
                self._finished = event
        for block, texts in zip(content, pieces, strict=True):
            self._complete(block, "".join(texts))
        return self._message(content, generation.usage, *self._stop_fields(generation.usage))

    def _complete(self, block: Block, text: str) -> None:
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ToolUseBlock):
            block.input = _read_input(text)
        elif self._seal is not None:
            block.signature = self._seal(text)
            block.thinking = text if self._show_thinking else ""

    def _write_thinking(self, text: str) -> Sequence[msgspec.Struct]:
        if self._seal is None:
            return ()
        chunks = [] if self._open is ThinkingBlock else self._begin(ThinkingBlock(thinking="", signature=""))
        self._thinking.append(text)
        if self._show_thinking:
            chunks.append(self._delta(type="thinking_delta", thinking=text))
        return chunks

    def _write_usage(self, usage: Usage) -> Sequence[msgspec.Struct]:
        if not self._started:
            self._started = True
            return [MessageStart(message=self._message([], usage, None, None))]
        reason, sequence = self._stop_fields(usage)
        delta = MessageDelta(
            delta=MessageDeltaBody(stop_reason=reason, stop_sequence=sequence), usage=self._counts.total_usage(usage)
        )
        return [delta, MessageStop()]

    def _begin(self, block: Block) -> list[msgspec.Struct]:
        chunks = self._end_block()
        self._index += 1
        self._open = type(block)
        chunks.append(BlockStart(index=self._index, content_block=block))
        return chunks

    def _end_block(self) -> list[msgspec.Struct]:
        if self._open is None:
            return []
        chunks: list[msgspec.Struct] = []
        if self._open is ThinkingBlock and self._seal is not None:
            chunks.append(self._delta(type="signature_delta", signature=self._seal("".join(self._thinking))))
            self._thinking.clear()
        self._open = None
        return [*chunks, BlockStop(index=self._index)]

    def _delta(self, **fields: Any) -> BlockDelta:
        return BlockDelta(index=self._index, delta=BlockDeltaBody(**fields))

    def _message(
        self, content: list[Block], usage: Usage, stop_reason: str | None, stop_sequence: str | None
    ) -> AssistantMessage:
        return AssistantMessage(
            id=self._id,
            model=self._model.id,
            content=content,
            stop_reason=stop_reason,
            stop_sequence=stop_sequence,
            usage=self._counts.usage(usage),
        )

    def _stop_fields(self, usage: Usage) -> tuple[str, str | None]:
        """Return the stop reason, and the stop sequence if there is one."""
        event = self._finished
        if event is None:
            return "end_turn", None
        if event.reason == "length":
            is_full = usage.completion_tokens < self._max_tokens
            return ("model_context_window_exceeded" if is_full else "max_tokens"), None
        if event.reason == "tool_calls":
            return "tool_use", None
        if event.stop is None:
            return "end_turn", None
        return "stop_sequence", event.stop if isinstance(event.stop, str) else self._model.decode_tokens([event.stop])


def _call_id(id: str) -> str:
    return "toolu_" + id.removeprefix("call_")


def _read_input(arguments: str) -> Any:
    """Return the input of a call as the model wrote it; an empty object if the output ended inside of it."""
    try:
        found = json.loads(arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return {}
    return msgspec.Raw(arguments.encode()) if isinstance(found, dict) else {}


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")
