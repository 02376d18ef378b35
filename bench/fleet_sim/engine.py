"""The side of the API servers: routes the requests of a model with the real router, and moves them.

When a request moves is decided as in `syringa.engine.client.model_engine`, without sockets and asyncio.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from bench.fleet_sim.collector import Collector
from bench.fleet_sim.event_loop import EventLoop
from bench.fleet_sim.replica import BatchedReplica, Work
from bench.fleet_sim.scenario import Scenario, SimulatedModel
from bench.fleet_sim.streams import Recovery, Stream
from syringa.engine.client.router import Assignment, ReplicaRouter, RoutingKey
from syringa.engine.client.runs import LAST_WAIT_SECONDS

OVERLOADED_SECONDS = 0.2  # until a moved request is submitted again to a replica with a full queue
MAX_RETRIES = 3  # of a request after crashes
TIMED_ROUTES = 16  # of so many requests in the peak, the time of the router is measured for one
BALANCE_SECONDS = 1.0  # after which requests that came before a replica was ready, and have not begun, move to it
LOAD_TIMEOUT = 600.0  # of a request that has begun, or waits while a replica is being started


class ModelClients:
    """The clients of one model in all API processes. Each process has a router of its own."""

    def __init__(
        self,
        model: SimulatedModel,
        scenario: Scenario,
        loop: EventLoop,
        collector: Collector,
        on_ended: Callable[[Stream], None],
        on_drained: Callable[[BatchedReplica], None],
    ) -> None:
        self.model, self.work = model, Work()
        self.routers = [ReplicaRouter() for _ in range(scenario.api_processes)]
        self.pending: deque[Stream] = deque()  # no replica is ready
        self.usable: list[str] = []
        self.present = 0  # replicas that are ready or being started
        self.active = 0
        self.waits = False  # whether requests have waited when `expire` was called last
        self._scenario, self._loop, self._collector = scenario, loop, collector
        self._on_ended, self.drained = on_ended, on_drained
        self._replicas: dict[str, BatchedReplica] = {}  # that are or were ready

    # Requests

    def submit(self, stream: Stream) -> None:
        self.active += 1
        self._route(stream)

    def _route(self, stream: Stream) -> None:
        if not self.usable:
            stream.replica = None
            self.pending.append(stream)
            return
        key = stream.key
        assert key is not None
        if stream.generated:
            key = RoutingKey(key.tenant, stream.prompt + int(stream.generated), 1, key.prefixes)
        target, stream.target = stream.target, ""
        assignment = self._choose(stream, key, [target] if target in self._replicas else self.usable)
        replica = self._replicas[assignment.replica]
        if len(replica.waiting) >= self._scenario.max_queue and not stream.prefilled:
            self.routers[stream.chat.api_process].release(assignment)
            if stream.moves and stream.waited < self._scenario.queue_timeout:
                stream.waited += OVERLOADED_SECONDS
                self._loop.after(OVERLOADED_SECONDS, self._route, stream)
            else:
                self._end(stream)
                self._collector.rejected(stream, self._loop.now, "queue full")
            return
        stream.assignment = assignment
        stream.routed_at = self._loop.now
        stream.waits_since = self._loop.now - self._counted(stream)
        replica.submit(stream)

    def _counted(self, stream: Stream) -> float:
        """Return the seconds in queues that count where a stream waits next."""
        return min(stream.waited, max(self._scenario.queue_timeout - LAST_WAIT_SECONDS, 0.0))

    def _choose(self, stream: Stream, key: RoutingKey, replicas: list[str]) -> Assignment:
        router = self.routers[stream.chat.api_process]
        if stream.id % TIMED_ROUTES or stream.arrived < self._scenario.peak_at:
            return router.choose(key, replicas)
        began = time.thread_time()
        assignment = router.choose(key, replicas)
        self._collector.routed(time.thread_time() - began)
        return assignment

    def _release(self, stream: Stream) -> None:
        if stream.assignment is not None:
            self.routers[stream.chat.api_process].release(stream.assignment)
            stream.assignment = None

    def _end(self, stream: Stream) -> None:
        self.active -= 1
        self._release(stream)
        if stream.recovery is not None:
            self._recovered(stream)

    def began(self, stream: Stream) -> None:
        """A replica has computed the prompt."""
        now = self._loop.now
        if stream.first_token_at is None:
            stream.first_token_at = now
            self._collector.first_token(stream)
        stream.prefilled = True
        if stream.left_at is not None:
            self._collector.pause(stream, now - stream.left_at)
            stream.left_at = None
        if stream.recovery is not None:
            self._recovered(stream)

    def finished(self, stream: Stream) -> None:
        self._end(stream)
        self._collector.completed(stream, self._loop.now)
        self._on_ended(stream)

    def reject(self, stream: Stream) -> None:
        """A request has waited in a queue for `queue_timeout`."""
        self._end(stream)
        self._collector.rejected(stream, self._loop.now, "queue_timeout")

    def _recovered(self, stream: Stream) -> None:
        recovery, stream.recovery = stream.recovery, None
        assert recovery is not None
        recovery.left -= 1
        if not recovery.left:
            self._collector.recovered(stream.move_reason, self._loop.now - recovery.begun)

    def expire(self) -> None:
        """End the requests that have waited for a replica for too long."""
        now = self._loop.now
        for _ in range(len(self.pending)):
            stream = self.pending.popleft()
            held = stream.prefilled or self.present
            limit = LOAD_TIMEOUT if held else self._scenario.queue_timeout - self._counted(stream)
            if now - stream.waits_since < limit:
                self.pending.append(stream)
            elif stream.prefilled:
                self._end(stream)
                self._collector.lost(stream, f"no replica for {limit:.0f} s")
            else:
                self.reject(stream)
        self.waits = bool(self.pending)
        for replica in self._replicas.values():
            if replica.waiting:
                self.waits = True
                replica.expire()

    # Replicas

    def replica_ready(self, replica: BatchedReplica) -> None:
        self._replicas[replica.id] = replica
        self.usable = [*self.usable, replica.id]
        self._loop.after(BALANCE_SECONDS, self._balance, (replica, self._loop.now))
        waiting, self.pending = self.pending, deque()
        for stream in waiting:
            self._route(stream)
        for each in [each for each in self._replicas.values() if each.condition == "draining"]:
            self._move_unfit(each)

    def _balance(self, joined: tuple[BatchedReplica, float]) -> None:
        """Let a new replica run requests that have waited at others since before it was ready."""
        replica, at = joined
        if replica.id not in self.usable:
            return
        by_process: dict[int, list[Stream]] = {}
        for each in self._replicas.values():
            for stream in each.not_begun() if not each.frozen else ():
                if stream.routed_at < at:
                    by_process.setdefault(stream.chat.api_process, []).append(stream)
        moving: dict[str, list[Stream]] = {}
        for process, streams in sorted(by_process.items()):
            streams.sort(key=lambda stream: stream.id)
            assignments = [stream.assignment for stream in streams if stream.assignment is not None]
            assert len(assignments) == len(streams)
            for position in self.routers[process].shed(assignments, replica.id):
                streams[position].target = replica.id
                moving.setdefault(assignments[position].replica, []).append(streams[position])
        for id, streams in moving.items():
            self._move(self._replicas[id], streams, "balance")

    def replica_draining(self, replica: BatchedReplica) -> None:
        """A replica that was ready is drained: what does not fit into the grace period moves."""
        self._unusable(replica)
        self._move_unfit(replica)

    def _move_unfit(self, replica: BatchedReplica) -> None:
        if not self.usable or replica.frozen:
            return
        left = replica.drained_at - self._loop.now
        replica.advance()
        moving = [stream for stream in replica.streams() if replica.seconds_left(stream) > left]
        if moving:
            self._move(replica, moving, "drain")

    def replica_silent(self, replica: BatchedReplica) -> None:
        """A replica does not respond: its requests move, unless they have done so before."""
        self._unusable(replica)
        if self.usable:
            moving = [each for each in replica.streams() if not each.silences and not each.crashes]
            self._move(replica, moving, "silence")

    def replica_gone(self, replica: BatchedReplica, reason: str) -> None:
        """A replica has ended: whatever it has not finished goes on elsewhere."""
        self._unusable(replica)
        self._replicas.pop(replica.id, None)
        moving = replica.streams()
        if moving:
            self._move(replica, moving, reason)
        for router in self.routers:
            router.retain(self._replicas.keys())

    def _unusable(self, replica: BatchedReplica) -> None:
        if replica.id in self.usable:
            self.usable = [each for each in self.usable if each != replica.id]

    def _move(self, replica: BatchedReplica, moving: list[Stream], reason: str) -> None:
        if not moving:
            return
        now = self._loop.now
        begun = replica.lost_at if reason in ("crash", "silence") else now
        recovery = Recovery(begun, len(moving))
        replica.take(moving)
        for stream in moving:
            self._release(stream)
            self._collector.moved(reason)
            stream.moves += 1
            stream.silences += reason == "silence"
            stream.crashes += reason == "crash"
            stream.move_reason = reason
            if not stream.prefilled:
                stream.waited = now - stream.waits_since
            stream.waits_since = now
            if stream.first_token_at is not None and stream.left_at is None:
                stream.left_at = recovery.begun
            if stream.recovery is not None:
                self._recovered(stream)
            stream.recovery = recovery
        for stream in moving:
            if stream.crashes > MAX_RETRIES:
                self._end(stream)
                self._collector.lost(stream, f"{stream.crashes} crashes")
            else:
                self._route(stream)
