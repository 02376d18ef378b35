"""Beam search: keep the likeliest continuations of a prompt instead of sampling one. Independent of the engine.

A beam's score is its total log-probability divided by its number of tokens to the power of the length penalty. In each
step, every beam is extended by its likeliest tokens, and the `width` likeliest results go on. An extension that ends
with an end or stop token is complete. The search ends when no beam can still become better than the `width` best
complete ones, so it finds the same as a search that always goes on to the maximum length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from syringa.types import FinishReason, StopConditions, TokenLogprobs


class Beam(NamedTuple):
    """A continuation of the prompt, with the log-probabilities of each token and its alternatives."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    finish: FinishReason = "length"

    def extend(self, token: int, logprob: float, top: list[tuple[int, float]], finish: FinishReason) -> Beam:
        scores = TokenLogprobs(token, logprob, top)
        return Beam((*self.tokens, token), (*self.logprobs, scores), self.total + logprob, finish)


class BeamSearch:
    """The state of the search for one prompt. Call `expand` with the next tokens' scores until `done`."""

    def __init__(self, width: int, length_penalty: float, stopping: StopConditions) -> None:
        self._width, self._length_penalty, self._stopping = width, length_penalty, stopping
        end_tokens = frozenset() if stopping.ignore_eos else stopping.end_tokens
        self._end_tokens = end_tokens | stopping.stop_tokens
        self._complete: list[Beam] = []  # the best, best first
        self.beams = [Beam()]

    @property
    def alternatives(self) -> int:
        """Number of likeliest tokens that `expand` needs of each beam: some of them may end it."""
        return self._width + len(self._end_tokens)

    @property
    def done(self) -> bool:
        if not self.beams or len(self.beams[0].tokens) >= self._stopping.max_tokens:
            return True
        if len(self._complete) < self._width:
            return False
        return self._score(self._complete[-1]) >= max(map(self._attainable_score, self.beams))

    def expand(self, scores: Sequence[TokenLogprobs]) -> None:
        """Continue each beam with the alternatives in `scores`, one for each of `beams` in their order."""
        candidates: list[tuple[float, Beam, int, float, list[tuple[int, float]]]] = []
        may_end = len(self.beams[0].tokens) + 1 >= self._stopping.min_tokens
        for beam, each in zip(self.beams, scores, strict=True):
            for token, logprob in each.top:
                if token not in self._end_tokens:
                    candidates.append((beam.total + logprob, beam, token, logprob, each.top))
                elif may_end:
                    self._complete.append(beam.extend(token, logprob, each.top, "stop"))
        # Sorting is stable: of equals, the one of the better beam and then of the lower token id comes first.
        self._complete = sorted(self._complete, key=self._score, reverse=True)[: self._width]
        best = sorted(candidates, key=lambda each: each[0], reverse=True)[: self._width]
        self.beams = [beam.extend(token, logprob, top, "length") for _, beam, token, logprob, top in best]

    def best(self) -> list[Beam]:
        """Return the best beams of a search that is done, best first."""
        ended = [beam for beam in self.beams if len(beam.tokens) >= self._stopping.max_tokens]
        return sorted([*self._complete, *ended], key=self._score, reverse=True)[: self._width]

    def _score(self, beam: Beam) -> float:
        return self._normalize(beam.total, len(beam.tokens))

    def _attainable_score(self, beam: Beam) -> float:
        """Return a score that no continuation of a beam exceeds: it can get longer, but not likelier."""
        longest = self._length_penalty > 0
        return self._normalize(beam.total, self._stopping.max_tokens if longest else len(beam.tokens) + 1)

    def _normalize(self, total: float, length: int) -> float:
        return total / math.pow(length, self._length_penalty)
