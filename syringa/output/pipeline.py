"""The stages of one choice, chained: tokens → text → thoughts apart → calls apart → up to a stop string → events.

Stop strings come last because they are about the answer's text: none ends a thought, or a call in the middle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from syringa.events import ChoiceEvent, EndReason, Finished, OutputFormat, ReasoningDelta, ScoredToken, TextDelta
from syringa.output.detokenizer import Detokenizer, TextSegment, TokenTables, plain_text
from syringa.output.harmony import HarmonyParser
from syringa.output.reasoning import ReasoningParser
from syringa.output.stages import ReasoningSegment, Segment, Stage
from syringa.output.stop_strings import StopStringMatcher
from syringa.output.tools.base import ToolCallParser
from syringa.output.tools.formats import create_tool_parser
from syringa.output_formats import REASONING_MARKERS
from syringa.types import EngineDelta, TokenLogprobs

PLAIN = OutputFormat()


class Pipeline:
    """Takes a choice's deltas. `tokens` counts what the choice has used: the token that ended it, none after."""

    def __init__(
        self,
        vocabulary: TokenTables,
        choice: int,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        show_tokens: bool = False,
        output: OutputFormat = PLAIN,
    ) -> None:
        self.done = False
        self.tokens = 0
        self.reasoning_tokens = 0
        self._choice = choice
        self._detokenizer = Detokenizer(vocabulary)
        self._thoughts, self._calls = _stages(output, choice)
        self._stop = StopStringMatcher(stop) if stop else None
        self._exempt = min_tokens if stop else 0  # tokens to come in whose text no stop string is looked for
        self._passed = 0  # tokens that went by the stop strings
        self._only_calls = output.tool_calls_only
        self._show_tokens = show_tokens
        self._plain = not (show_tokens or stop or self._thoughts or self._calls)
        self._unshown: deque[TokenLogprobs] = deque()
        self._logprobs: list[float] = []
        self._shown = 0  # characters

    def feed(self, delta: EngineDelta) -> list[ChoiceEvent]:
        """The events that a delta makes. The end token is counted and scored, and has no text."""
        tokens = delta.tokens
        self.tokens += len(tokens)
        if delta.logprobs:
            self._keep(delta.logprobs)
        if delta.finish is None and self._plain:
            text = plain_text(self._detokenizer.feed(tokens))
            return [TextDelta(self._choice, text)] if text else []
        if delta.stop_token is not None:
            tokens = tokens[:-1]
        pieces = self._detokenizer.feed(tokens)
        if delta.finish is None:
            parts = self._cut(self._take_apart(pieces))
            if self._stop is not None and self._stop.matched is not None:
                return self._end_at_stop(parts, self._stop)
            return self._show(parts)
        return self._end(pieces + self._detokenizer.flush(), delta)

    @property
    def mean_logprob(self) -> float:
        """Per counted token; what candidates are ranked by. None drawn is none lost."""
        return sum(self._logprobs[: self.tokens]) / self.tokens if self.tokens else 0.0

    def _keep(self, logprobs: list[TokenLogprobs]) -> None:
        self._logprobs += [each.logprob for each in logprobs]
        if self._show_tokens:
            self._unshown += logprobs

    def _end(self, pieces: list[TextSegment], delta: EngineDelta) -> list[ChoiceEvent]:
        parts = self._cut(self._take_apart(pieces, last=True))
        if self._stop is not None:
            if self._stop.matched is not None:
                return self._end_at_stop(parts, self._stop)
            parts += self._stop.flush()
        reason: EndReason = "length" if delta.finish == "length" else "stop"
        events = self._finish(parts, reason, delta.stop_token)
        if self._show_tokens and delta.stop_token is not None and self._unshown:
            # The end token has a log-probability of its own, though no text: who sums them up counts on it.
            ended = TextDelta(self._choice, "", [ScoredToken(self._unshown.popleft(), self._shown)])
            events.insert(len(events) - 1, ended)
        return events

    def _end_at_stop(self, parts: list[Segment], stop: StopStringMatcher) -> list[ChoiceEvent]:
        self.tokens = self._passed + stop.consumed
        return self._finish(parts, "stop", stop.matched)

    def _finish(self, parts: list[Segment], reason: EndReason, stop: str | int | None) -> list[ChoiceEvent]:
        self.done = True
        events = self._show(parts)
        if self._calls is not None and self._calls.calls and reason == "stop":
            reason = "tool_calls"
        events.append(Finished(self._choice, reason, stop))
        return events

    def _take_apart(self, pieces: list[TextSegment], *, last: bool = False) -> list[Segment]:
        parts: list[Segment] = list(pieces)
        if self._thoughts is not None:
            parts = self._thoughts.feed(pieces)
            if last:
                parts += self._thoughts.flush()
        if self._calls is None or self._calls is self._thoughts:
            return parts
        out: list[Segment] = []
        answer: list[TextSegment] = []
        for part in parts:
            if isinstance(part, TextSegment):
                answer.append(part)
                continue
            out += self._calls.feed(answer)
            out.append(part)
            answer = []
        out += self._calls.feed(answer)
        return out + self._calls.flush() if last else out

    def _cut(self, parts: list[Segment]) -> list[Segment]:
        """Up to a stop string; what may become one is held back."""
        stop = self._stop
        if stop is None:
            return parts
        out: list[Segment] = []
        for part in parts:
            if stop.matched is not None:
                break
            if isinstance(part, TextSegment) and self._exempt <= 0:
                out += stop.feed([part])
                continue
            out += stop.flush()  # no stop string reaches across what is not text
            out.append(part)
            if isinstance(part, TextSegment | ReasoningSegment):
                self._exempt -= part.tokens
                self._passed += part.tokens
        return out

    def _show(self, parts: Sequence[Segment]) -> list[ChoiceEvent]:
        """Neighbors of one kind become one event."""
        events: list[ChoiceEvent] = []
        texts: list[str] = []
        scored: list[ScoredToken] = []
        thoughts: list[str] = []

        def settle() -> None:
            if thoughts:
                events.append(ReasoningDelta(self._choice, "".join(thoughts)))
                thoughts.clear()
            text = "".join(texts)
            if text or scored:
                events.append(TextDelta(self._choice, text, scored[:]))
            texts.clear()
            scored.clear()

        for part in parts:
            if isinstance(part, TextSegment):
                if thoughts:
                    settle()
                self._score(part, scored)
                if part.text and not part.special and not self._only_calls:
                    texts.append(part.text)
            elif isinstance(part, ReasoningSegment):
                if texts or scored:
                    settle()
                self._forget(part)
                if part.text:
                    thoughts.append(part.text)
            else:
                settle()
                events.append(part)
        settle()
        return events

    def _score(self, piece: TextSegment, scored: list[ScoredToken]) -> None:
        if not self._show_tokens:
            return
        for _ in range(piece.tokens):
            scored.append(ScoredToken(self._unshown.popleft(), self._shown))
        if not piece.special:
            self._shown += len(piece.text)

    def _forget(self, thought: ReasoningSegment) -> None:
        """A thought's tokens are counted apart, and their log-probabilities are not shown."""
        self.reasoning_tokens += thought.tokens
        if self._show_tokens:
            for _ in range(thought.tokens):
                self._unshown.popleft()


def _stages(output: OutputFormat, choice: int) -> tuple[Stage | None, ToolCallParser | None]:
    if "harmony" in (output.reasoning, output.tool_calls):
        both = HarmonyParser(choice)
        return both, both
    thoughts = (
        ReasoningParser(REASONING_MARKERS[output.reasoning], opened=output.reasoning_open)
        if output.reasoning is not None
        else None
    )
    calls = (
        create_tool_parser(output.tool_calls, choice, output.tool_schemas) if output.tool_calls is not None else None
    )
    return thoughts, calls
