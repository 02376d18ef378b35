"""Back-off after a step ran out of memory (OOM): split it until the sequence that needs too much is found. Torch-free.

The sequences of a failed step are retried in two halves, a half that fails is split again, and those with the most
tokens to compute run last. A sequence that fails alone gets half as many tokens per step; one that fails even with the
smallest step fails its request, and no other. This takes a few dozen steps at most, and every sequence of the failed
step runs in one of them.

Afterwards a step has at most half as many tokens as the one that failed. The limit doubles after every `GOOD_STEPS`
steps without a failure, because memory that another program took may become free again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import TracebackType

from syringa.engine.scheduling.scheduler_output import ScheduledSequence
from syringa.engine.scheduling.sequence import Sequence

GOOD_STEPS = 32  # successful steps after which the limit doubles
PAUSE_SECONDS = 0.02  # after a failure, for memory that another program took for a moment
MAX_FAILURES = 64  # in a row: by then halving has long ended
NO_GPU_MEMORY = "no_gpu_memory"  # error code: the same start may succeed once other programs have left the GPU
# Messages of libraries that have no exception class for it: torch on CPUs and GPUs, cuBLAS, C++.
_OOM_MESSAGES = ("allocate memory", "out of memory", "alloc_failed", "bad_alloc")

OUT_OF_MEMORY = (
    "There is too little memory to compute this request, even a token at a time: try again later, or with a shorter "
    "prompt. More is left for computing where the server has a smaller kv_cache_gb."
)


def is_oom(error: BaseException) -> bool:
    """Return whether an exception means that memory has run out."""
    if isinstance(error, RuntimeError):
        message = str(error).lower()
        return any(words in message for words in _OOM_MESSAGES)
    return isinstance(error, MemoryError)


class OOMGuard:
    """Context manager that suppresses out-of-memory errors and reports them in `out_of_memory`.

    Tensors of the block are released when it ends, which would not happen inside an `except` clause.
    """

    out_of_memory = False

    def __enter__(self) -> OOMGuard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self.out_of_memory = error is not None and is_oom(error)
        return self.out_of_memory


class OOMBackoff:
    """Step size and membership of the steps after a failure. `budget` is a step's token budget without failures."""

    def __init__(self, budget: int) -> None:
        self.limit = self._budget = budget
        self._successes = self._failures = 0
        self._groups: list[list[Sequence]] = []  # parts of a failed step; the last one is next
        self._token_limits: dict[Sequence, int] = {}  # of sequences that failed alone

    @property
    def group(self) -> list[Sequence] | None:
        """The sequences to retry in the next step; None: the step is open to all."""
        return self._groups[-1] if self._groups else None

    def token_limit(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence a step may compute."""
        return self._token_limits.get(sequence, self._budget)

    def skip_group(self) -> None:
        """Drop a group that has nothing left to compute."""
        self._groups.pop()

    def record_success(self) -> None:
        self._failures = 0
        if self._groups:
            self._groups.pop()
        elif self.limit < self._budget or self._token_limits:
            self._successes += 1
            if self._successes >= GOOD_STEPS:
                self._successes, self.limit = 0, min(self._budget, 2 * self.limit)
                doubled = {sequence: 2 * limit for sequence, limit in self._token_limits.items()}
                self._token_limits = {each: limit for each, limit in doubled.items() if limit < self._budget}

    def record_failure(self, remaining: Seq[ScheduledSequence], *, tokens: int, alone: bool) -> list[Sequence]:
        """Split a step that was rolled back, and return the sequences whose requests have to fail.

        `remaining` are its items that still run; `tokens` is its size; `alone` says whether it had a single item.
        """
        self._successes = 0
        self._failures += 1
        if self._groups:
            self._groups.pop()
        else:
            self.limit = max(1, tokens // 2)
        if self._failures > MAX_FAILURES:
            return [item.sequence for item in remaining]
        if len(remaining) > 1:
            ordered = [item.sequence for item in sorted(remaining, key=lambda item: item.count)]
            half = len(ordered) // 2
            self._groups += [ordered[half:], ordered[:half]]
            return []
        for item in remaining:
            if not alone:  # the other items have ended or start over: this one has not been tried alone
                self._groups.append([item.sequence])
                return []
            # The tokens of an image may have to be computed together, so the step may not have become smaller.
            if item.count == 1 or item.count > self.token_limit(item.sequence):
                return [item.sequence]
            self._token_limits[item.sequence] = item.count // 2
            self._groups.append([item.sequence])
        return []

    def forget(self, sequence: Sequence) -> None:
        self._token_limits.pop(sequence, None)
