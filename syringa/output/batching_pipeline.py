"""A pipeline that emits the events of several tokens at once, for streams with fewer and larger chunks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from syringa.events import ChoiceEvent, ReasoningDelta, TextDelta, TokenIds, ToolCallDelta
from syringa.output.pipeline import Pipeline
from syringa.types import EngineDelta


class BatchingPipeline(Pipeline):
    """Holds events back until there were `interval` tokens. The first and the last events are returned at once.

    Tokens are processed and counted as they come: a stop string ends the choice without delay.
    """

    def __init__(self, *args: Any, interval: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._interval = interval
        self._held: list[ChoiceEvent] = []
        self._held_tokens = 0
        self._begun = False

    def feed(self, delta: EngineDelta) -> list[ChoiceEvent]:
        events = super().feed(delta)
        self._held += events
        self._held_tokens += len(delta.tokens)
        if not self._held or (self._begun and not self.done and self._held_tokens < self._interval):
            return []
        self._begun = True
        held, self._held, self._held_tokens = self._held, [], 0
        return list(join_events(held))


def join_events(events: Iterable[ChoiceEvent]) -> Iterator[ChoiceEvent]:
    """Join adjacent events of one kind. All token ids come first, as they precede the text of their tokens."""
    others: list[ChoiceEvent] = []
    ids: list[TokenIds] = []
    for event in events:
        if isinstance(event, TokenIds):
            ids.append(event)
        else:
            others.append(event)
    if ids:
        yield TokenIds(ids[0].choice, [token for each in ids for token in each.tokens])
    for _, group in itertools.groupby(others, key=lambda event: (type(event), getattr(event, "call", None))):
        yield from _join(list(group))


def _join(group: list[ChoiceEvent]) -> list[ChoiceEvent]:
    first = group[0]
    if len(group) == 1:
        return group
    if isinstance(first, TextDelta):
        texts = [each for each in group if isinstance(each, TextDelta)]
        scored = [token for each in texts for token in each.tokens]
        return [TextDelta(first.choice, "".join(each.text for each in texts), scored)]
    if isinstance(first, ReasoningDelta):
        text = "".join(each.text for each in group if isinstance(each, ReasoningDelta))
        return [ReasoningDelta(first.choice, text)]
    if isinstance(first, ToolCallDelta):
        arguments = "".join(each.arguments for each in group if isinstance(each, ToolCallDelta))
        return [ToolCallDelta(first.choice, first.call, arguments)]
    return group
