"""The two classes of requests that a scheduler knows, and what each of them has of its own. Torch-free.

Background requests run in the gaps: they get what a step leaves, are admitted only while no other request waits, and
are preempted first. Inside of a class, tenants share fairly.
"""

from __future__ import annotations

from collections import Counter

from syringa.engine.scheduling.fair_queue import FairQueue, VirtualTokenCounters
from syringa.engine.scheduling.limits import AdmissionMode
from syringa.engine.scheduling.scheduler_output import SchedulerOutput
from syringa.engine.scheduling.sequence import Sequence

# How long a step with background requests alone should take: a request that arrives waits for half of it on average.
ALONE_SECONDS = 0.045
# The same where such a step is given up for a request that arrives (`execution/interruption.py`).
INTERRUPTIBLE_SECONDS = 0.4
# The same for a step in which streams get their next tokens, too.
SHARED_SECONDS = 0.015
# A step gets at least so many background tokens, or a large model, whose steps take long anyway, would do nothing else.
MIN_ALONE_TOKENS, MIN_SHARED_TOKENS = 32, 4


class RequestClass:
    """The waiting requests of a class, and how much its tenants run and were served."""

    def __init__(self, quantum: int, *, background: bool) -> None:
        self.background = background
        self.waiting = FairQueue[Sequence]()
        self.token_counters = VirtualTokenCounters(quantum)
        self.running_counts: Counter[str] = Counter()  # running sequences by tenant; no zeros

    def add_running(self, tenant: str) -> None:
        self.running_counts[tenant] += 1

    def remove_running(self, tenant: str) -> None:
        self.running_counts[tenant] -= 1
        if not self.running_counts[tenant]:
            del self.running_counts[tenant]

    def request_count(self, tenant: str) -> int:
        return self.running_counts[tenant] + self.waiting.count(tenant)

    def may_admit(self, tenant: str, mode: AdmissionMode) -> bool:
        return mode is AdmissionMode.OPEN or (mode is AdmissionMode.IDLE_TENANTS and tenant not in self.running_counts)


class StepTokens:
    """The number of background tokens in a step, adapted to how long steps take."""

    def __init__(self, seconds: float, smallest: int, largest: int) -> None:
        """`seconds`: that a step should take at most."""
        self._seconds, self._smallest, self._largest = seconds, smallest, max(smallest, largest)
        self.limit = smallest

    def record(self, tokens: int, seconds: float) -> None:
        """Adapt the limit after a step with so many background tokens."""
        ratio = min(2.0, max(0.5, self._seconds / max(seconds, 1e-6)))
        if ratio < 1:
            self.limit = max(self._smallest, round(self.limit * ratio))
        else:  # a step takes at most twice as long with twice the tokens; this one may have had fewer than the limit
            self.limit = min(self._largest, max(self.limit, round(tokens * ratio)))

    def record_interruption(self) -> bool:
        """Adapt the limit after a step that was given up. Return whether it was the smallest already."""
        smallest = self.limit == self._smallest
        self.limit = max(self._smallest, self.limit // 2)
        return smallest


class BackgroundSteps:
    """How many tokens of background requests a step may compute, with streams in it and without."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self.protected = False  # whether the next step may not be given up, or none would ever end
        self.set_interruptible(False)
        self._shared = StepTokens(SHARED_SECONDS, min(MIN_SHARED_TOKENS, budget), budget)

    def set_interruptible(self, interruptible: bool) -> None:
        """Set whether steps with background requests alone are given up for a request that arrives."""
        seconds = INTERRUPTIBLE_SECONDS if interruptible else ALONE_SECONDS
        self._alone = StepTokens(seconds, min(MIN_ALONE_TOKENS, self._budget), self._budget)

    def limit(self, output: SchedulerOutput) -> int:
        """Return the limit for a step that has other requests already, none of which may be a prompt: 0 then."""
        if not output.scheduled:
            return self._alone.limit
        if any(item.count > 1 or not item.sequence.generated for item in output.scheduled):
            return 0  # a client waits for its first token
        return self._shared.limit

    def record(self, output: SchedulerOutput, seconds: float) -> None:
        """Adapt the limits after a step."""
        tokens = sum([item.count for item in output.scheduled if item.sequence.request.background])
        if tokens:
            self.protected = False
            alone = tokens == output.tokens
            (self._alone if alone else self._shared).record(tokens, seconds)

    def record_interruption(self) -> None:
        """Adapt the limits after a step with background requests alone that was given up."""
        self.protected = self._alone.record_interruption()


def is_background(sequence: Sequence) -> bool:
    return sequence.request.background
