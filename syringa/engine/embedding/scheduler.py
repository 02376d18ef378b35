"""Which inputs of the waiting requests are computed in the next step. Torch-free.

A step packs inputs up to a token budget. The next input is of the tenant that was served least, and of its first
request; the inputs of a request may be spread over several steps. Background requests get steps in which nothing else
waits. A request that is isolated is computed first, in steps of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from syringa.engine.scheduling.fair_queue import FairQueue, VirtualTokenCounters
from syringa.engine.scheduling.limits import QueueFull, SchedulerLimits
from syringa.types import EmbeddingRequest

GOOD_STEPS = 32  # successful steps after which a budget that was halved doubles


class EmbeddingJob:
    """A request, which of its inputs were scheduled, and the vectors that were computed."""

    __slots__ = (
        "_order",
        "_taken",
        "client_id",
        "dropped",
        "queue_seconds",
        "request",
        "rows",
        "started",
        "submitted",
        "values",
    )

    def __init__(self, request: EmbeddingRequest, client_id: int, submitted: float) -> None:
        self.request, self.client_id, self.submitted = request, client_id, submitted
        # Inputs of similar lengths share a step, which matters to models that need padding.
        self._order = sorted(range(len(request.inputs)), key=lambda index: -len(request.inputs[index]))
        self._taken = 0
        self.rows = 0  # that were computed
        self.values: np.ndarray | None = None  # [inputs, width]
        self.started = False  # whether it was in a step
        self.queue_seconds = 0.0  # until then
        self.dropped = False

    @property
    def begun(self) -> bool:
        return self._taken > 0

    @property
    def left(self) -> bool:
        """Whether there is an input that is not scheduled."""
        return self._taken < len(self._order)

    @property
    def done(self) -> bool:
        return self.rows == len(self._order)

    @property
    def next_length(self) -> int:
        return len(self.request.inputs[self._order[self._taken]])

    def take(self) -> int:
        """Return the index of the next input, which is scheduled."""
        self._taken += 1
        return self._order[self._taken - 1]

    def untake(self, count: int) -> None:
        """Let the last inputs be scheduled again."""
        self._taken -= count

    def store(self, index: int, row: np.ndarray) -> None:
        if self.values is None:
            self.values = np.empty((len(self._order), len(row)), dtype="<f4")
        self.values[index] = row
        self.rows += 1


class ScheduledInput(NamedTuple):
    job: EmbeddingJob
    number: int  # of the input in its request

    @property
    def tokens(self) -> list[int]:
        return self.job.request.inputs[self.number]

    @property
    def second(self) -> int:
        """Where the second text of a pair begins; 0: no pair."""
        second = self.job.request.second
        return second[self.number] if second else 0


class EmbeddingScheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self._budget = limits.step_tokens
        self._good_steps = 0
        self._isolated: deque[EmbeddingJob] = deque()
        self._queues = {background: FairQueue[EmbeddingJob]() for background in (False, True)}
        self._counters = {background: VirtualTokenCounters(quantum=limits.step_tokens) for background in (False, True)}

    def __len__(self) -> int:
        """The number of requests with inputs that are not scheduled."""
        return len(self._isolated) + sum(map(len, self._queues.values()))

    @property
    def waiting(self) -> int:
        """The number of those that clients wait for, and not in the background: a reason for more replicas."""
        return len(self._isolated) + len(self._queues[False])

    @property
    def tenants(self) -> set[str]:
        """The tenants of those."""
        return {*self._queues[False].tenants, *(job.request.tenant for job in self._isolated)}

    def add(self, job: EmbeddingJob) -> EmbeddingJob | None:
        """Queue a request, and return one that it displaces. Raises `QueueFull`.

        In a full queue, a tenant below its share displaces the newest request of the tenant with the most. A background
        request waits however many others do: the API servers bound what they run of batches.
        """
        if job.request.isolated:  # it was accepted before
            self._isolated.append(job)
            return None
        queue = self._queues[job.request.background]
        displaced = None
        if not job.request.background and len(queue) + len(self._isolated) >= self.limits.max_queue:
            displaced = queue.displaced_by(job.request.tenant, self.limits.max_queue)
            if displaced is None:
                raise QueueFull
            queue.remove(displaced)
        queue.add(job)
        return displaced

    def remove(self, job: EmbeddingJob) -> None:
        """Forget a request, wherever it is."""
        if job in self._isolated:
            self._isolated.remove(job)
        elif job.left:
            self._queues[job.request.background].remove(job)

    def schedule(self) -> list[ScheduledInput]:
        """Return the inputs of the next step: at most the budget's tokens, or one input."""
        if self._isolated:
            job = self._isolated[0]
            scheduled = list(self._fill(lambda: job if job.left else None))
            if not job.left:
                self._isolated.popleft()
            return scheduled
        background = not len(self._queues[False])
        queue, counters = self._queues[background], self._counters[background]
        counters.begin_step(queue.tenants)

        def next_job() -> EmbeddingJob | None:
            return queue.head(counters.order(queue.tenants, queue.count)[0]) if len(queue) else None

        scheduled = []
        for item in self._fill(next_job):
            scheduled.append(item)
            counters.charge(item.job.request.tenant, len(item.tokens))
            if not item.job.left:
                queue.remove(item.job)
        return scheduled

    def _fill(self, next_job: Callable[[], EmbeddingJob | None]) -> Iterator[ScheduledInput]:
        left = self._budget
        while (job := next_job()) is not None and (left == self._budget or job.next_length <= left):
            left -= job.next_length
            yield ScheduledInput(job, job.take())

    def overdue(self, before: float) -> list[EmbeddingJob]:
        """Return the requests that were submitted before that time and have not begun. Background ones may wait."""
        return self._queues[False].overdue(before)

    def roll_back(self, scheduled: list[ScheduledInput]) -> None:
        """Schedule the inputs of a step that ran out of memory again, in steps of half the size."""
        self._budget = max(1, sum(len(item.tokens) for item in scheduled) // 2)
        self._good_steps = 0
        counts: dict[EmbeddingJob, int] = {}
        for item in scheduled:
            counts[item.job] = counts.get(item.job, 0) + 1
        for job, count in reversed(counts.items()):  # each goes to the head of its queue
            waits = job.left
            job.untake(count)
            if not waits and not job.dropped:
                if job.request.isolated:
                    self._isolated.appendleft(job)
                else:
                    self._queues[job.request.background].add(job, first=True)

    def record_success(self) -> None:
        self._good_steps += 1
        if self._good_steps >= GOOD_STEPS and self._budget < self.limits.step_tokens:
            self._budget = min(2 * self._budget, self.limits.step_tokens)
            self._good_steps = 0
