"""The replicas that an engine is connected to, and the requests that they run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from syringa.engine.client.moves import RequestProgress
from syringa.engine.client.router import Assignment
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.interface import DeltaHandler, MoveReason, ReplicaState
from syringa.types import EmbeddingRequest, EngineRequest

LAST_WAIT_SECONDS = 2.0  # for which a request may wait after a move at least


class ConnectedReplica:
    """A replica that was ready, and the connection to it."""

    def __init__(self, state: ReplicaState, client: WorkerClient) -> None:
        self.state, self.client = state, client
        self.ended = False  # whether the supervisor no longer reports it
        self.checked = False  # whether its connection is about to be checked
        self.joined = False  # whether it was ready before
        self.drained_at: float | None = None  # when its grace period ends

    @property
    def usable(self) -> bool:
        return self.state.status == "ready" and not self.ended and self.client.ready and not self.client.silent


class QueueTime:
    """How long a request has waited without having begun: for a replica, and in the queues of replicas."""

    def __init__(self, limit: float = 0.0, waited: float = 0.0) -> None:
        """`limit`: the seconds that it may wait in all; 0: any number."""
        self.limit, self.waited = limit, waited

    @property
    def exceeded(self) -> bool:
        return 0 < self.limit <= self.waited

    @property
    def counted(self) -> float:
        """The seconds that count where the request waits next.

        It may have been computed when it had to move, without a token yet, so it has a moment to begin again.
        """
        return min(self.waited, max(self.limit - LAST_WAIT_SECONDS, 0.0)) if self.limit else self.waited

    @contextlib.contextmanager
    def count(self) -> Iterator[None]:
        """Count the time until the end of the block."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.waited += loop.time() - began


class GenerationRun:
    """A request, and the replica that runs it; None while it waits for one."""

    def __init__(
        self, request: EngineRequest, on_delta: DeltaHandler, unresumable: Sequence[str] = (), queue_timeout: float = 0
    ) -> None:
        """`unresumable`: its fields because of which another replica cannot continue it, once it has begun."""
        self.queue = QueueTime(0 if request.background else queue_timeout, request.waited)
        self.request, self.progress, self.unresumable = request, RequestProgress(request, on_delta), unresumable
        self.replica: ConnectedReplica | None = None
        self.assignment: Assignment | None = None  # to that replica
        self.target = ""  # the replica to which it is to move
        self.retries = 0  # after crashes
        self.silences = 0  # moves away from a replica that did not respond
        self.hangs = 0  # of these, from one that the supervisor found hanging in a step
        self.left: tuple[MoveReason, str] | None = None  # why it left the last replica, and the fingerprint of that
        self.counted = False  # whether that move was reported

    @property
    def bound(self) -> bool:
        """Whether it would fail at another replica."""
        return bool(self.unresumable) and self.progress.resumes


class EmbeddingRun:
    """A request for embeddings, and the replica that runs it; None while it waits for one."""

    def __init__(self, request: EmbeddingRequest, queue_timeout: float = 0) -> None:
        self.queue = QueueTime(0 if request.background else queue_timeout, request.waited)
        self.request = request
        self.replica: ConnectedReplica | None = None
        self.retries = 0  # after crashes
        self.moves = 0
