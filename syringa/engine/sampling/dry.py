"""DRY ("don't repeat yourself"): penalize tokens that would continue a repeated run of tokens, by the run's length.

The rule is that of text-generation-webui: if the last n tokens have occurred before, the token that followed them there
loses multiplier * base ** (n - allowed_length), for n >= allowed_length and the longest such n. A run never contains a
breaker token, and a breaker is never penalized, because it is what ends a run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from syringa.types import SamplingParams

# Longer runs count as this long: with the usual base, the penalty exceeds any logit long before.
_MAX_RUN = 50
# The largest penalty: far above any logit, and far from overflowing float32.
_MAX_PENALTY = 1e6


class DryState:
    """A sequence's tokens and, for each position, the length of the run ending there that equals the sequence's end.

    Keeping the lengths makes a step one pass over the context instead of a search: after a new token t, the run ending
    at i is one longer than the run that ended at i - 1 before if token i is t, and empty if not.
    """

    def __init__(self, sampling: SamplingParams, tokens: Sequence[int]) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = max(sampling.dry_allowed_length, 1)
        self._longest = max(_MAX_RUN, self._allowed)
        self._breakers = sampling.dry_breakers
        self._breaker_ids = np.array(sorted(sampling.dry_breakers), dtype=np.int64)
        self._size = len(tokens)
        self._tokens = np.zeros(self._size + 256, dtype=np.int64)
        self._tokens[: self._size] = tokens
        # Slot 0 is before the sequence, so that shifting needs no special first element. The slot of the last token
        # stays 0, because the end of a sequence is not a repetition of itself.
        self._lengths = np.zeros(self._size + 257, dtype=np.int32)
        self._measure()

    def observe(self, token: int) -> None:
        n = self._size
        if n == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._lengths = np.concatenate([self._lengths, np.zeros(n, dtype=np.int32)])
        self._tokens[n] = token
        self._size = n + 1
        if token in self._breakers:
            self._lengths[: n + 1] = 0
            return
        longer = np.minimum(self._lengths[:n] + 1, self._longest)
        self._lengths[1 : n + 1] = np.where(self._tokens[:n] == token, longer, 0)

    def penalties(self) -> tuple[np.ndarray, np.ndarray]:
        """Return token ids, each once, and their penalties."""
        n = self._size
        ends = np.flatnonzero(self._lengths[1:n] >= self._allowed)
        following = self._tokens[ends + 1]
        if len(self._breaker_ids) and len(ends):
            free = ~np.isin(following, self._breaker_ids)
            ends, following = ends[free], following[free]
        ids, slots = np.unique(following, return_inverse=True)
        longest = np.zeros(len(ids), dtype=np.int32)
        np.maximum.at(longest, slots, self._lengths[ends + 1])
        penalties = [self._penalty(int(length)) for length in longest]
        return ids, np.array(penalties, dtype=np.float32)

    def fork(self) -> DryState:
        other = object.__new__(DryState)
        other.__dict__.update(self.__dict__)
        other._tokens, other._lengths = self._tokens.copy(), self._lengths.copy()
        return other

    def _penalty(self, length: int) -> float:
        try:
            return float(min(self._multiplier * self._base ** (length - self._allowed), _MAX_PENALTY))
        except OverflowError:
            return _MAX_PENALTY

    def _measure(self) -> None:
        """Compute the lengths for the initial tokens, walking back from the end along all candidates at once."""
        n = self._size
        tokens = self._tokens
        if n < 2:
            return
        ends = np.arange(n - 1)
        for length in range(min(self._longest, n - 1)):
            token = int(tokens[n - 1 - length])
            if token in self._breakers:
                break
            ends = ends[ends >= length]
            ends = ends[tokens[ends - length] == token]
            if not len(ends):
                break
            self._lengths[ends + 1] = length + 1
