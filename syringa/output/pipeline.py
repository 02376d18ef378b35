"""The output stages of one choice, chained: detokenizer → reasoning parser → tool-call parser → stop strings → events.

Stop strings come last because they apply to the text of the answer: they never end reasoning or a tool call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Set

from syringa.events import (
    ChoiceEvent,
    ChoiceFinishReason,
    Finished,
    OutputFormat,
    ReasoningDelta,
    ScoredToken,
    TextDelta,
    TokenIds,
)
from syringa.output.detokenizer import Detokenizer, TextSegment, TokenTables
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
    """Turn the engine deltas of a choice into events.

    `tokens` counts the tokens of the choice, up to and including the one that ended it.
    """

    def __init__(
        self,
        tokenizer: TokenTables,
        choice: int,
        *,
        stop: Sequence[str] = (),
        stop_tokens: Set[int] = frozenset(),
        min_tokens: int = 0,
        show_tokens: bool = False,
        include_stop: bool = False,
        show_special: bool = False,
        space_special: bool = False,
        report_tokens: bool = False,
        output: OutputFormat = PLAIN,
    ) -> None:
        """`stop_tokens` are the request's own, which `Finished` names.

        `show_tokens` adds log-probabilities to the text, `include_stop` what ended the choice, `show_special` special
        tokens, `space_special` a space between two of them in a row; `report_tokens` adds events with the ids of all
        tokens.
        """
        self.done = False
        self.tokens = 0
        self.reasoning_tokens = 0
        self._choice = choice
        self._detokenizer = Detokenizer(tokenizer)
        self._reasoning_parser, self._tool_parser = _create_parsers(output, choice)
        self._stop = StopStringMatcher(stop, include=include_stop) if stop else None
        self._stop_tokens = stop_tokens
        self._include_stop = include_stop
        self._show_special = show_special
        self._space_special = space_special
        self._after_special = False
        self._token_ids: list[int] | None = [] if report_tokens else None  # of tokens without an event
        self._tokens_before_stop = min_tokens if stop else 0  # whose text is not searched for stop strings
        self._unmatched_tokens = 0  # tokens that were not fed to the stop strings
        self._tool_calls_only = output.tool_calls_only
        self._show_tokens = show_tokens
        parsed = stop or self._reasoning_parser or self._tool_parser
        self._plain = not (show_tokens or show_special or report_tokens or parsed)
        self._pending_logprobs: deque[TokenLogprobs] = deque()
        self._logprobs: list[float] = []
        self._text_length = 0  # characters emitted

    def feed(self, delta: EngineDelta) -> list[ChoiceEvent]:
        """Return the events of a delta. The end token is counted and scored, but has no text."""
        tokens = delta.tokens
        self.tokens += len(tokens)
        if delta.logprobs:
            self._add_logprobs(delta.logprobs)
        if delta.finish is None and self._plain:
            text = self._detokenizer.feed_text(tokens)
            return [TextDelta(self._choice, text)] if text else []
        if self._token_ids is not None:
            self._token_ids += tokens
        if delta.stop_token is not None and not self._include_stop:
            tokens = tokens[:-1]
        text_segments = self._detokenizer.feed(tokens)
        if delta.finish is None:
            segments = self._apply_stop(self._parse(text_segments))
            if self._stop is not None and self._stop.matched is not None:
                return self._end_at_stop(segments, self._stop)
            if self._tool_parser is not None and self._tool_parser.ended:
                dropped = sum(each.tokens for each in self._detokenizer.flush())
                return self._end_after_calls(segments, self._tool_parser.dropped + dropped)
            return self._to_events(segments)
        return self._end(text_segments + self._detokenizer.flush(), delta)

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of the counted tokens, by which candidates are ranked; 0 without tokens."""
        return sum(self._logprobs[: self.tokens]) / self.tokens if self.tokens else 0.0

    def _add_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        self._logprobs += [each.logprob for each in logprobs]
        if self._show_tokens:
            self._pending_logprobs += logprobs

    def _end(self, text_segments: list[TextSegment], delta: EngineDelta) -> list[ChoiceEvent]:
        segments = self._apply_stop(self._parse(text_segments, last=True))
        if self._stop is not None:
            if self._stop.matched is not None:
                return self._end_at_stop(segments, self._stop)
            segments += self._stop.flush()
        if self._tool_parser is not None and self._tool_parser.ended:
            without_text = 1 if delta.stop_token is not None and not self._include_stop else 0
            return self._end_after_calls(segments, self._tool_parser.dropped + without_text)
        reason: ChoiceFinishReason = "length" if delta.finish == "length" else "stop"
        stop_token = delta.stop_token if delta.stop_token in self._stop_tokens else None
        events = self._finish(segments, reason, stop_token)
        if self._show_tokens and delta.stop_token is not None and self._pending_logprobs:
            # The end token has a log-probability but no text; clients that sum log-probabilities need it.
            end_token = ScoredToken(self._pending_logprobs.popleft(), self._text_length)
            events.insert(len(events) - 1, TextDelta(self._choice, "", [end_token]))
        return events

    def _end_at_stop(self, segments: list[Segment], stop: StopStringMatcher) -> list[ChoiceEvent]:
        self._drop_tokens(self.tokens - self._unmatched_tokens - stop.consumed)
        return self._finish(segments, "stop", stop.matched)

    def _end_after_calls(self, segments: list[Segment], dropped: int) -> list[ChoiceEvent]:
        """End the choice where text follows tool calls."""
        self._drop_tokens(dropped)
        return self._finish(segments, "stop", None)

    def _drop_tokens(self, count: int) -> None:
        self.tokens -= count
        if self._token_ids is not None and count:
            del self._token_ids[-count:]

    def _finish(self, segments: list[Segment], reason: ChoiceFinishReason, stop: str | int | None) -> list[ChoiceEvent]:
        self.done = True
        events = self._to_events(segments)
        if self._tool_parser is not None and self._tool_parser.calls and reason == "stop":
            reason = "tool_calls"
        if self._token_ids:
            events.append(TokenIds(self._choice, self._token_ids))
        events.append(Finished(self._choice, reason, stop))
        return events

    def _parse(self, text_segments: list[TextSegment], *, last: bool = False) -> list[Segment]:
        """Separate reasoning and tool calls from the text."""
        segments = self._classify(text_segments, last=last)
        if not self._show_special:
            return segments
        return [self._shown(each) for each in segments]

    def _shown(self, segment: Segment) -> Segment:
        """Return a special token as text, any other segment as it is."""
        after_special = self._after_special
        self._after_special = isinstance(segment, TextSegment) and segment.special
        if not isinstance(segment, TextSegment) or not segment.special:
            return segment
        space = " " if self._space_special and after_special else ""
        return TextSegment(space + segment.text, segment.tokens)

    def _classify(self, text_segments: list[TextSegment], *, last: bool) -> list[Segment]:
        segments: list[Segment] = list(text_segments)
        if self._reasoning_parser is not None:
            segments = self._reasoning_parser.feed(text_segments)
            if last:
                segments += self._reasoning_parser.flush()
        if self._tool_parser is None or self._tool_parser is self._reasoning_parser:
            return segments
        out: list[Segment] = []
        answer: list[TextSegment] = []
        for segment in segments:
            if isinstance(segment, TextSegment):
                answer.append(segment)
                continue
            out += self._tool_parser.feed(answer)
            out.append(segment)
            answer = []
        out += self._tool_parser.feed(answer)
        return out + self._tool_parser.flush() if last else out

    def _apply_stop(self, segments: list[Segment]) -> list[Segment]:
        """Cut the text at a stop string, and hold back what may become one."""
        stop = self._stop
        if stop is None:
            return segments
        out: list[Segment] = []
        for segment in segments:
            if stop.matched is not None:
                break
            if isinstance(segment, TextSegment) and self._tokens_before_stop <= 0:
                out += stop.feed([segment])
                continue
            out += stop.flush()  # a stop string does not span reasoning or tool calls
            out.append(segment)
            if isinstance(segment, TextSegment | ReasoningSegment):
                self._tokens_before_stop -= segment.tokens
                self._unmatched_tokens += segment.tokens
        return out

    def _to_events(self, segments: Sequence[Segment]) -> list[ChoiceEvent]:
        """Convert segments to events; adjacent segments of one kind become one event."""
        events: list[ChoiceEvent] = []
        if self._token_ids:
            self._report_tokens(segments, self._token_ids, events)
        texts: list[str] = []
        scored: list[ScoredToken] = []
        reasoning: list[str] = []

        def emit_pending() -> None:
            if reasoning:
                events.append(ReasoningDelta(self._choice, "".join(reasoning)))
                reasoning.clear()
            text = "".join(texts)
            if text or scored:
                events.append(TextDelta(self._choice, text, scored[:]))
            texts.clear()
            scored.clear()

        for segment in segments:
            if isinstance(segment, TextSegment):
                if reasoning:
                    emit_pending()
                self._score(segment, scored)
                if segment.text and not segment.special and not self._tool_calls_only:
                    texts.append(segment.text)
            elif isinstance(segment, ReasoningSegment):
                if texts or scored:
                    emit_pending()
                self._count_reasoning(segment)
                if segment.text:
                    reasoning.append(segment.text)
            else:
                emit_pending()
                events.append(segment)
        emit_pending()
        return events

    def _report_tokens(self, segments: Sequence[Segment], ids: list[int], events: list[ChoiceEvent]) -> None:
        count = sum(each.tokens for each in segments if isinstance(each, TextSegment | ReasoningSegment))
        if count:
            events.append(TokenIds(self._choice, ids[:count]))
            del ids[:count]

    def _score(self, segment: TextSegment, scored: list[ScoredToken]) -> None:
        if not self._show_tokens:
            return
        for _ in range(segment.tokens):
            scored.append(ScoredToken(self._pending_logprobs.popleft(), self._text_length))
        if not segment.special:
            self._text_length += len(segment.text)

    def _count_reasoning(self, segment: ReasoningSegment) -> None:
        """Count reasoning tokens, and drop their log-probabilities."""
        self.reasoning_tokens += segment.tokens
        if self._show_tokens:
            for _ in range(segment.tokens):
                self._pending_logprobs.popleft()


def _create_parsers(output: OutputFormat, choice: int) -> tuple[Stage | None, ToolCallParser | None]:
    if "harmony" in (output.reasoning, output.tool_calls):
        harmony = HarmonyParser(choice)
        return harmony, harmony
    reasoning_parser, tool_parser = None, None
    if output.reasoning is not None:
        reasoning_parser = ReasoningParser(REASONING_MARKERS[output.reasoning], opened=output.reasoning_open)
    if output.tool_calls is not None:
        tool_parser = create_tool_parser(output.tool_calls, choice, output.tool_schemas)
    return reasoning_parser, tool_parser
