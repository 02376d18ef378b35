"""A step found too little memory: what follows is smaller, until it is known who needs too much. Torch-free.

The step is taken apart. Its sequences run in two halves, a half that fails in two again, those with the most to compute
last. One that fails alone gets half as many tokens at a time; one for which even the smallest step fails is given up:
its request fails, and nobody else's. All of that takes a few dozen steps at most, in which everybody else of the step
has its turn too.

Afterwards a step has at most half as many tokens as the one that failed. The bound doubles whenever some steps in a row
have gone well: memory that another program took for a moment comes back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from types import TracebackType

from syringa.engine.scheduling.scheduler_output import Scheduled
from syringa.engine.scheduling.sequence import Sequence

GOOD_STEPS = 32  # after so many that went well, the next may be twice as large
PAUSE_SECONDS = 0.02  # after a failure: what another program took for a moment is there again
MOST_FAILURES = 64  # in a row: halving has come to an end long before
NO_GPU_MEMORY = "no_gpu_memory"  # the code of an error that may not come again when others have left the GPU
# What libraries say where there is no class for it: torch of a CPU's and of a GPU's memory, cuBLAS, C++.
_WORDS = ("allocate memory", "out of memory", "alloc_failed", "bad_alloc")

TOO_LARGE = (
    "There is too little memory to compute this request, even a token at a time: try again later, or with a shorter "
    "prompt. More is left for computing where the server has a smaller kv_cache_gb."
)


def is_shortage(error: BaseException) -> bool:
    if isinstance(error, RuntimeError):
        said = str(error).lower()
        return any(words in said for words in _WORDS)
    return isinstance(error, MemoryError)


class Attempt:
    """`with Attempt() as attempt:` ends with `short` where there is too little memory for what is done in it.

    What was computed until then is let go by the end of the block, as it would not be inside an `except`.
    """

    short = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        self.short = error is not None and is_shortage(error)
        return self.short


class Relief:
    """How large a step may be, and whose it has to be."""

    def __init__(self, most: int) -> None:
        """`most`: tokens of a step when nothing is short."""
        self.limit = self._most = most
        self._good = self._failures = 0
        self._groups: list[list[Sequence]] = []  # parts of a step that failed; the next one is the last
        self._shares: dict[Sequence, int] = {}  # tokens of a step for those that failed alone

    @property
    def group(self) -> list[Sequence] | None:
        """Those that the next step is for; None: it is for everybody."""
        return self._groups[-1] if self._groups else None

    def share(self, sequence: Sequence) -> int:
        """How many of its tokens a step may compute."""
        return self._shares.get(sequence, self._most)

    def skip(self) -> None:
        """Nobody of that group needs anything any more."""
        self._groups.pop()

    def went_well(self) -> None:
        self._failures = 0
        if self._groups:
            self._groups.pop()
        elif self.limit < self._most or self._shares:
            self._good += 1
            if self._good >= GOOD_STEPS:
                self._good, self.limit = 0, min(self._most, 2 * self.limit)
                self._shares = {each: 2 * few for each, few in self._shares.items() if 2 * few < self._most}

    def failed(self, items: Seq[Scheduled], *, tokens: int, alone: bool) -> list[Sequence]:
        """These are left of a step that was undone, which had so many `tokens`; `alone`: of a single sequence. Returns
        those that are to be given up."""
        self._good = 0
        self._failures += 1
        if self._groups:
            self._groups.pop()
        else:
            self.limit = max(1, tokens // 2)
        if self._failures > MOST_FAILURES:
            return [item.sequence for item in items]
        if len(items) > 1:
            ordered = [item.sequence for item in sorted(items, key=lambda item: item.count)]
            half = len(ordered) // 2
            self._groups += [ordered[half:], ordered[:half]]
            return []
        for item in items:
            if not alone:  # the others have ended meanwhile, or begin again: it is still to be tried by itself
                self._groups.append([item.sequence])
                return []
            # An image's tokens may have to be computed together: then the step was no smaller than the one before.
            if item.count == 1 or item.count > self.share(item.sequence):
                return [item.sequence]
            self._shares[item.sequence] = item.count // 2
            self._groups.append([item.sequence])
        return []

    def forget(self, sequence: Sequence) -> None:
        self._shares.pop(sequence, None)
