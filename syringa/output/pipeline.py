"""The stages of one choice, chained: tokens → text → up to a stop string → calls apart from text → events. Counts
tokens as they pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from syringa.events import ChoiceEvent, EndReason, Finished, ScoredToken, TextDelta
from syringa.output.detokenizer import Detokenizer, Piece, Vocabulary, plain_text
from syringa.output.stop import StopStrings
from syringa.output.tools import call_parser
from syringa.types import EngineDelta, TokenLogprobs


class Pipeline:
    """Takes a choice's deltas. `tokens` counts what the choice has used: the token that ended it, none after."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        choice: int,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        show_tokens: bool = False,
        tool_format: str | None = None,
    ) -> None:
        self.done = False
        self.tokens = 0
        self._choice = choice
        self._detokenizer = Detokenizer(vocabulary)
        self._stop = StopStrings(stop) if stop else None
        self._exempt = min_tokens if stop else 0  # tokens to come in whose text no stop string is looked for
        self._passed = 0  # tokens that went by the stop strings
        self._calls = call_parser(tool_format, choice) if tool_format is not None else None
        self._show_tokens = show_tokens
        self._unshown: deque[TokenLogprobs] = deque()
        self._logprobs: list[float] = []
        self._shown = 0  # characters

    def feed(self, delta: EngineDelta) -> list[ChoiceEvent]:
        """The events that a delta makes. The end token is counted and scored, and has no text."""
        tokens = delta.tokens
        self.tokens += len(tokens)
        if delta.logprobs:
            self._keep(delta.logprobs)
        if delta.stop_token is not None:
            tokens = tokens[:-1]
        first: list[Piece] = []
        if self._exempt:
            first = self._detokenizer.feed(tokens[: self._exempt])
            self._passed += sum(piece.tokens for piece in first)
            tokens, self._exempt = tokens[self._exempt :], max(0, self._exempt - len(tokens))
        pieces = self._detokenizer.feed(tokens)
        if delta.finish is not None:
            pieces += self._detokenizer.flush()
        if self._stop is not None:
            pieces = first + self._stop.feed(pieces)
            if self._stop.matched is not None:
                self.tokens = self._passed + self._stop.consumed
                return self._finish(pieces, Finished(self._choice, "stop", self._stop.matched))
            if delta.finish is not None:
                pieces += self._stop.flush()
        if delta.finish is not None:
            reason: EndReason = "length" if delta.finish == "length" else "stop"
            events = self._finish(pieces, Finished(self._choice, reason, delta.stop_token))
            if self._show_tokens and delta.stop_token is not None and self._unshown:
                # The end token has a log-probability of its own, though no text: who sums them up counts on it.
                ended = TextDelta(self._choice, "", [ScoredToken(self._unshown.popleft(), self._shown)])
                events.insert(len(events) - 1, ended)
            return events
        return self._show(pieces) if self._calls is None else self._show_calls(pieces)

    @property
    def mean_logprob(self) -> float:
        """Per counted token; what candidates are ranked by. None drawn is none lost."""
        return sum(self._logprobs[: self.tokens]) / self.tokens if self.tokens else 0.0

    def _keep(self, logprobs: list[TokenLogprobs]) -> None:
        self._logprobs += [each.logprob for each in logprobs]
        if self._show_tokens:
            self._unshown += logprobs

    def _show(self, pieces: list[Piece]) -> list[ChoiceEvent]:
        if self._show_tokens:
            return self._show_scored(pieces)
        text = pieces[0].text if len(pieces) == 1 and not pieces[0].special else plain_text(pieces)
        return [TextDelta(self._choice, text)] if text else []

    def _show_scored(self, pieces: list[Piece]) -> list[ChoiceEvent]:
        scored = []
        texts = []
        for piece in pieces:
            for _ in range(piece.tokens):
                scored.append(ScoredToken(self._unshown.popleft(), self._shown))
            if not piece.special:
                texts.append(piece.text)
                self._shown += len(piece.text)
        text = "".join(texts)
        return [TextDelta(self._choice, text, scored)] if text or scored else []

    def _show_calls(self, pieces: list[Piece], *, last: bool = False) -> list[ChoiceEvent]:
        assert self._calls is not None
        parts = self._calls.feed(pieces)
        if last:
            parts += self._calls.flush()
        events: list[ChoiceEvent] = []
        text: list[Piece] = []
        for part in parts:
            if isinstance(part, Piece):
                text.append(part)
                continue
            events += self._show(text)
            events.append(part)
            text = []
        return events + self._show(text)

    def _finish(self, pieces: list[Piece], last: Finished) -> list[ChoiceEvent]:
        self.done = True
        if self._calls is None:
            events = self._show(pieces)
        else:
            events = self._show_calls(pieces, last=True)
            if self._calls.calls and last.reason == "stop":
                last = Finished(last.choice, "tool_calls", last.stop)
        events.append(last)
        return events
