"""The host's part of sampling: the state of a choice, the sampler's input rows and the logits that their rules edit.

Torch-free: `sampler` has the device's part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from syringa.engine.sampling.dry import DryState
from syringa.types import SamplingParams

NO_TOKEN = -1  # the sampler's result for a row that has no token to sample

# Below this temperature, dividing the differences of logits leaves nothing but the best token.
_GREEDY_BELOW = 1e-5
# Factors of the repetition penalty beyond which a float32 logit may become infinite or lose its order.
_MIN_FACTOR, _MAX_FACTOR = 1e-30, 1e30


class SamplerState:
    """The sampling state of one choice. It is empty for a choice whose rules do not depend on its history.

    Call `observe` with every token of the output, and `fork` when a choice forks.
    """

    __slots__ = (
        "allowed", "bad_words", "bias", "counts", "dry", "edits", "filtered", "greedy", "needs_host", "sampling",
    )  # fmt: skip

    def __init__(self, sampling: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()) -> None:
        s = self.sampling = sampling
        self.greedy = s.temperature < _GREEDY_BELOW
        self.filtered = not self.greedy and (s.top_k > 0 or s.top_p < 1 or s.min_p > 0)
        self.bias: tuple[np.ndarray, np.ndarray] | None = None
        if s.logit_bias:
            ids, values = np.array(list(s.logit_bias), dtype=np.int64), list(s.logit_bias.values())
            self.bias = ids, np.array(values, dtype=np.float32)
        self.counts: _TokenCounts | None = None
        if s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty:
            self.counts = _TokenCounts(prompt if s.repetition_penalty != 1 else (), output)
        self.dry: DryState | None = None
        if s.dry_multiplier > 0:
            self.dry = DryState(s, [*prompt, *output])
        self.bad_words = _BadWords(s.bad_words, output) if s.bad_words else None
        self.allowed = _pack_mask(s.allowed_tokens) if s.allowed_tokens else None
        rules = (self.bias, self.counts, self.dry, self.bad_words)
        self.edits = any(rule is not None for rule in rules)  # whether single logits are edited
        self.needs_host = self.edits or self.allowed is not None  # whether logits are changed before a token is drawn

    def observe(self, token: int) -> None:
        if self.counts is not None:
            self.counts.add(token)
        if self.dry is not None:
            self.dry.observe(token)
        if self.bad_words is not None:
            self.bad_words.observe(token)

    def fork(self) -> SamplerState:
        other = object.__new__(SamplerState)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        other.counts = self.counts.fork() if self.counts is not None else None
        other.dry = self.dry.fork() if self.dry is not None else None
        other.bad_words = self.bad_words.fork() if self.bad_words is not None else None
        return other


@dataclass(slots=True)
class SamplingRow:
    """The sampler's input for the next token of one choice."""

    state: SamplerState
    choice: int = 0  # index of the choice, which keys the noise
    position: int = 0  # number of generated tokens, which keys the noise
    logprobs: int | None = None  # None: not requested; 0: the token's own; k: also the k best
    banned: Collection[int] = ()  # tokens that are excluded at this position
    preferred: int | None = None  # taken if it has the highest logit
    logprob_tokens: tuple[int, ...] = ()  # whose log-probabilities are reported instead of those of the best


class _BadWords:
    """Token sequences that the output may not contain: the last token of one is banned where the others precede it."""

    def __init__(self, words: Sequence[tuple[int, ...]], output: Sequence[int]) -> None:
        self._single = frozenset(word[0] for word in words if len(word) == 1)
        self._longer: dict[int, list[tuple[int, ...]]] = {}  # by the last token before the banned one
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append(word)
        self._window = max(map(len, words)) - 1
        self._recent = tuple(output)[-self._window :] if self._window else ()

    def observe(self, token: int) -> None:
        if self._window:
            self._recent = (*self._recent, token)[-self._window :]

    def banned(self) -> frozenset[int]:
        """Return the tokens that would complete a sequence."""
        recent = self._recent
        found = self._longer.get(recent[-1], ()) if recent else ()
        return self._single.union(word[-1] for word in found if recent[1 - len(word) :] == word[:-1])

    def fork(self) -> _BadWords:
        other = object.__new__(_BadWords)
        other._single, other._longer, other._window = self._single, self._longer, self._window
        other._recent = self._recent
        return other


def _pack_mask(tokens: Collection[int]) -> np.ndarray:
    """Return a token mask like a grammar's, which ends at the highest token."""
    bits = np.zeros(32 * (max(tokens) // 32 + 1), dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class _TokenCounts:
    """The distinct tokens of a sequence, and how often each of them was generated."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        known = np.unique(np.array(prompt, dtype=np.int64))
        self._slots = {token: slot for slot, token in enumerate(known.tolist())}
        self._ids = np.concatenate([known, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    @property
    def seen(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    def generated(self) -> tuple[np.ndarray, np.ndarray]:
        counts = self._counts[: len(self._slots)]
        some = counts > 0
        return self.seen[some], counts[some]

    def fork(self) -> _TokenCounts:
        other = object.__new__(_TokenCounts)
        other._slots, other._ids, other._counts = self._slots.copy(), self._ids.copy(), self._counts.copy()
        return other


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Logits to edit, by index into the flattened batch. The slices are the parts of both arrays for each step."""

    indices: np.ndarray
    amounts: np.ndarray
    bias: slice
    repetition: slice
    output: slice
    dry: slice
    banned: slice


def collect_edits(rows: Sequence[SamplingRow], vocab_size: int) -> LogitEdits:
    """Collect the single logits that the rules of the rows edit, each index at most once per step."""
    steps: list[list[tuple[int, np.ndarray, np.ndarray | float]]] = [[], [], [], [], []]
    bias, repetition, output, dry, banned = steps
    for i, row in enumerate(rows):
        state, sampling = row.state, row.state.sampling
        if state.bias is not None:
            bias.append((i, *state.bias))
        if state.counts is not None:
            if sampling.repetition_penalty != 1:
                factor = min(max(sampling.repetition_penalty, _MIN_FACTOR), _MAX_FACTOR)
                repetition.append((i, state.counts.seen, factor))
            if sampling.frequency_penalty or sampling.presence_penalty:
                ids, counts = state.counts.generated()
                output.append((i, ids, sampling.frequency_penalty * counts + sampling.presence_penalty))
        if state.dry is not None:
            dry.append((i, *state.dry.penalties()))
        excluded = row.banned
        if state.bad_words is not None:
            excluded = state.bad_words.banned().union(excluded)
        if excluded:
            banned.append((i, np.array(list(excluded), dtype=np.int64), 0.0))
    indices, amounts, spans = [np.empty(0, np.int64)], [np.empty(0, np.float32)], []
    size = 0
    for step in steps:
        start = size
        for i, ids, amount in step:
            each = np.broadcast_to(np.asarray(amount, dtype=np.float32), ids.shape)
            # Prompts may contain ids beyond the vocabulary (images), which would index another row of the batch.
            valid = (ids >= 0) & (ids < vocab_size)
            indices.append(ids[valid] + i * vocab_size)
            amounts.append(each[valid])
            size += len(indices[-1])
        spans.append(slice(start, size))
    return LogitEdits(np.concatenate(indices), np.concatenate(amounts), *spans)
