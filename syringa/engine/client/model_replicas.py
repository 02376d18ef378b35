"""The replicas of one model: connections to those that the supervisor reports, and waiting for one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from syringa.cluster.tls import TlsFiles
from syringa.engine.client.runs import ConnectedReplica, QueueTime
from syringa.engine.client.stats import ReplicaStats
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.interface import LoadStatus, ReplicaState
from syringa.engine.processes.control import AcquireModel, SupervisorRequest, WorkerState
from syringa.errors import EngineUnavailable
from syringa.types import EngineStats, ModelInfo

Send = Callable[[SupervisorRequest], None]
OnChange = Callable[[Sequence[ConnectedReplica]], None]
"""Called when anything has changed, with the replicas that have become usable for the first time."""

RECONNECT_SECONDS = 1.0  # after which a lost connection is made again
REPORT_SECONDS = 2.0  # for the supervisor to report that a worker has died


class ModelReplicas:
    """The replicas of one model, as the supervisor reports them. It is asked for one when a request needs one."""

    def __init__(
        self,
        name: str,
        acquire: AcquireModel,
        send: Send,
        load_timeout: float,
        on_loaded: Callable[[ModelInfo], None],
        on_change: OnChange,
        *,
        queue_timeout: float = 0.0,
        tls: TlsFiles | None = None,
    ) -> None:
        """The arguments are those of `ModelEngine`."""
        self.status: LoadStatus = "cold"
        self.removed = False  # whether the model is no longer configured
        self.acquire = acquire
        self.closed = False
        self._name, self._send, self._load_timeout = name, send, load_timeout
        self._on_loaded, self._on_change, self._tls = on_loaded, on_change, tls
        self._queue_timeout = queue_timeout
        self._starting = False  # whether a replica is being started, or is there
        self._reason = ""
        self._replicas: dict[str, ConnectedReplica] = {}
        self._clients: set[WorkerClient] = set()  # all that may be connected, to be closed at the end
        self._stats = ReplicaStats()
        self._updates = 0  # number of states received from the supervisor
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return any(replica.usable for replica in self._replicas.values())

    @property
    def ids(self) -> list[str]:
        return list(self._replicas)

    @property
    def usable(self) -> dict[str, ConnectedReplica]:
        return {id: each for id, each in self._replicas.items() if each.usable}

    def has_other(self, replica: ConnectedReplica) -> bool:
        """Return whether another replica is usable."""
        return any(each.usable for each in self._replicas.values() if each is not replica)

    def set_acquire(self, acquire: AcquireModel) -> None:
        """Replace what is asked for, after a change of settings that a running worker need not know."""
        if acquire != self.acquire:
            self.acquire = acquire
            if self.status == "loaded":
                self._send(msgspec.structs.replace(acquire, opportunistic=True))

    def update(self, state: WorkerState) -> None:
        """Apply a state that the supervisor reports of the model.

        The reason of a failure may name files of the server: the supervisor logs it, and clients do not see it.
        """
        self.status, self._reason = state.status, state.reason
        self._starting = any(each.status != "draining" for each in state.replicas)
        self._updates += 1
        for each in state.replicas:
            self._update_replica(each)
        for gone in self._replicas.keys() - {each.id for each in state.replicas}:
            self._replicas.pop(gone).ended = True
            self._stats.end(gone)
        self._clients = {client for client in self._clients if not client.lost}
        self.notify()

    def _update_replica(self, state: ReplicaState) -> None:
        replica = self._replicas.get(state.id)
        if state.status == "ready" and (replica is None or replica.client.lost):
            client = WorkerClient(state.address, tls=self._tls, on_change=self.notify)
            client.start()
            self._clients.add(client)
            self._replicas[state.id] = ConnectedReplica(state, client)
        elif replica is not None:
            begins = state.status == "draining" and replica.state.status != "draining"
            replica.state = state
            if begins:
                loop = asyncio.get_running_loop()
                replica.drained_at = loop.time() + state.grace
                if state.grace < 1e6:  # a model that is evicted while it is in use has no limit
                    loop.call_later(state.grace, self._on_change, ())

    def notify(self) -> None:
        """Wake all waiters to look at the state again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if (info := self.info()) is not None:
            self._on_loaded(info)
        joined = [each for each in self._replicas.values() if each.usable and not each.joined]
        for replica in joined:
            replica.joined = True
        self._on_change(joined)
        for replica in self._replicas.values():
            if replica.state.status == "ready" and not replica.client.ready and not replica.checked:
                replica.checked = True
                asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self._check_connection, replica)

    def _check_connection(self, replica: ConnectedReplica) -> None:
        """Ask the supervisor for the state of a replica whose connection is lost: the answer makes another one."""
        replica.checked = False
        if replica.client.lost and not replica.ended and not self.closed:
            self._send(msgspec.structs.replace(self.acquire, opportunistic=True))

    def info(self) -> ModelInfo | None:
        """Return the facts of the usable replica with the shortest context: it depends on the memory of each."""
        infos = [each.client.info for each in self._replicas.values() if each.usable and each.client.info is not None]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    async def stats(self) -> EngineStats:
        """Return the statistics of the usable replicas together. One that is lost meanwhile is left out.

        Counters are those of all replicas since the start of this process, as far as they were seen.
        """
        clients = {id: each.client for id, each in self._replicas.items() if each.usable}
        found = await asyncio.gather(*(client.stats() for client in clients.values()), return_exceptions=True)
        answers = dict(zip(clients, found, strict=True))
        known = {id: each for id, each in answers.items() if isinstance(each, EngineStats) and id in self._replicas}
        if not known:
            raise self._unavailable("is not loaded")
        return self._stats.update(known)

    async def close(self) -> None:
        self.closed = True
        self.notify()
        await asyncio.gather(*(client.close() for client in self._clients))

    # Waiting

    async def wait_for_report(self, replica: ConnectedReplica) -> None:
        """Wait until the supervisor has reported the end of a replica, and with it the requests that are suspected.

        Ends early if it turns out that only the connection was lost.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while not self.is_settled(replica) and not self.closed:
                    await self._changed.wait()

    def is_settled(self, replica: ConnectedReplica) -> bool:
        """Return whether a lost replica has ended or is connected again."""
        current = self._replicas.get(replica.state.id)
        return current is None or (current is not replica and current.client.ready)

    async def wait_usable(self, queue: QueueTime | None = None, *, unlimited: bool = False) -> None:
        """Wait until there is a usable replica; one is acquired if there is none.

        `queue`: how long the request has waited before; the time in which no replica is being started is added.
        `unlimited`: for a request that has begun, or that runs in the background. As in the queue of a worker, it does
        not end by `queue_timeout`.
        """
        if self.ready:
            return
        try:
            async with asyncio.timeout(self._load_timeout or None):
                await self._acquire_replica(queue or QueueTime(), unlimited)
        except TimeoutError:
            problem = f"could not be loaded within {self._load_timeout:g} seconds{self._why()}"
            raise self._unavailable(problem) from None

    async def _acquire_replica(self, queue: QueueTime, unlimited: bool) -> None:
        acquired_at = -1
        began = asyncio.get_running_loop().time() - queue.counted
        while True:
            if self.closed:
                raise self._unavailable("is not loaded: the server is being stopped")
            if self.ready:
                return
            if self.removed:
                raise self._unavailable("is no longer configured")
            if acquired_at < 0 or (self.status == "cold" and self._updates > acquired_at):
                self._send(self.acquire)
                acquired_at = self._updates
            elif self.status == "failed" and self._updates > acquired_at:
                raise self._unavailable("cannot be loaded: the log of the server has the reason")
            limited = self._queue_timeout and not self._starting and not unlimited
            limit = began + self._queue_timeout if limited else None
            try:
                with queue.count() if limited else contextlib.nullcontext():
                    async with asyncio.timeout_at(limit):
                        await self._changed.wait()
            except TimeoutError:
                problem = f"has no replica, and none was started within {self._queue_timeout:g} seconds{self._why()}"
                raise self._unavailable(problem) from None

    def _why(self) -> str:
        """Return why it is not loaded, for a message. See `update` for the reason of a failure."""
        return f": {self._reason}" if self._reason and self.status != "failed" else ""

    def _unavailable(self, problem: str) -> EngineUnavailable:
        return EngineUnavailable(f"The model {self._name!r} {problem}", code="model_unavailable")
