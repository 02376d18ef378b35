"""The engine of one model: routes requests to its replicas, and moves them when a replica drains, dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

import msgspec

from syringa.cluster.tls import TlsFiles
from syringa.engine.client.moves import Moved, RequestProgress
from syringa.engine.client.router import ReplicaRouter, routing_key
from syringa.engine.client.stats import ReplicaStats
from syringa.engine.client.worker_client import WorkerClient
from syringa.engine.interface import DeltaHandler, LoadStatus, MoveReason, ReplicaState
from syringa.engine.processes.control import (
    AcquireModel,
    ClearSuspect,
    SupervisorRequest,
    WorkerState,
    worker_key,
)
from syringa.engine.processes.suspects import REFUSED, fingerprint
from syringa.errors import EngineOverloaded, EngineUnavailable, InvalidRequest, RequestSuspected, WorkerLost
from syringa.types import EngineRequest, EngineStats, Isolation, ModelInfo

logger = logging.getLogger("syringa.engine")

Send = Callable[[SupervisorRequest], None]
OnMove = Callable[[MoveReason, bool], None]
"""Called with each move: its reason, and whether the new replica has the fingerprint of the old one."""
OnRoute = Callable[[bool], None]
"""Called with each choice among several replicas: whether one has served a prefix of the prompt."""

CLOCK_SECONDS = 0.01  # a timer of the event loop may end that much too early
OVERLOADED_SECONDS = 0.2  # until a moved request is submitted again to a replica with a full queue
RECONNECT_SECONDS = 1.0  # after which a lost connection is made again
REPORT_SECONDS = 2.0  # for the supervisor to report that a worker has died
MAX_RETRIES = 3  # of a request after crashes; announced moves are not limited
SUSPECTED = "The model worker ended twice while it computed this request: it is not run again."
ISOLATION: tuple[Isolation, ...] = ("none", "start", "full")  # by the number of crashes


class _Replica:
    """A replica that was ready, and the connection to it."""

    def __init__(self, state: ReplicaState, client: WorkerClient) -> None:
        self.state, self.client = state, client
        self.ended = False  # whether the supervisor no longer reports it
        self.checked = False  # whether its connection is about to be checked
        self.drained_at: float | None = None  # when its grace period ends

    @property
    def usable(self) -> bool:
        return self.state.status == "ready" and not self.ended and self.client.ready and not self.client.silent


class _Run:
    """A request, and the replica that runs it; None while it waits for one."""

    def __init__(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        self.request, self.progress = request, RequestProgress(request, on_delta)
        self.replica: _Replica | None = None
        self.retries = 0  # after crashes
        self.silences = 0  # moves away from a replica that did not respond
        self.hangs = 0  # of these, from one that the supervisor found hanging in a step
        self.left: tuple[MoveReason, str] | None = None  # why it left the last replica, and the fingerprint of that
        self.counted = False  # whether that move was reported


class ModelEngine:
    """The engine of one model. It asks the supervisor for a replica when a request needs one."""

    def __init__(
        self,
        name: str,
        acquire: AcquireModel,
        send: Send,
        load_timeout: float,
        on_loaded: Callable[[ModelInfo], None],
        on_move: OnMove = lambda reason, same: None,
        on_route: OnRoute = lambda known: None,
        *,
        queue_timeout: float = 0.0,
        tls: TlsFiles | None = None,
    ) -> None:
        """`load_timeout` is how many seconds a request waits for the model; 0: without limit.

        `queue_timeout`: how many seconds it waits while no replica is being started; 0: as long as for the model.
        `tls`: the files of a client, for replicas that are reached over TCP.
        """
        self.name = name
        self.status: LoadStatus = "cold"
        self.removed = False  # whether the model is no longer configured
        self.suspects: Mapping[bytes, int] = {}  # requests that were running at crashes, see `SuspectTable.levels`
        self._key = worker_key(acquire.options)
        self._acquire, self._send, self._load_timeout = acquire, send, load_timeout
        self._on_loaded, self._on_move, self._on_route, self._tls = on_loaded, on_move, on_route, tls
        self._queue_timeout = queue_timeout
        self._starting = False  # whether a replica is being started, or is there
        self._reason = ""
        self._replicas: dict[str, _Replica] = {}
        self._clients: set[WorkerClient] = set()  # all that may be connected, to be closed at the end
        self._router = ReplicaRouter()
        self._stats = ReplicaStats()
        self._runs: dict[str, _Run] = {}  # by request id
        self._updates = 0  # number of states received from the supervisor
        self._changed = asyncio.Event()
        self._closed = False

    @property
    def ready(self) -> bool:
        return any(replica.usable for replica in self._replicas.values())

    def set_acquire(self, acquire: AcquireModel) -> None:
        """Replace what is asked for, after a change of settings that a running worker need not know."""
        if acquire != self._acquire:
            self._acquire = acquire
            if self.status == "loaded":
                self._send(msgspec.structs.replace(acquire, opportunistic=True))

    # What the supervisor reports

    def update(self, state: WorkerState) -> None:
        """Apply a state that the supervisor reports of the model.

        The reason of a failure may name files of the server: it is logged, and not shown to clients.
        """
        if state.status == "failed" and (state.status, state.reason) != (self.status, self._reason):
            logger.error("model cannot be loaded: model=%s reason=%r", self.name, state.reason)
        self.status, self._reason = state.status, state.reason
        self._starting = any(each.status != "draining" for each in state.replicas)
        self._updates += 1
        for each in state.replicas:
            self._update_replica(each)
        for gone in self._replicas.keys() - {each.id for each in state.replicas}:
            self._replicas.pop(gone).ended = True
            self._stats.end(gone)
        self._router.retain(self._replicas.keys())
        self._clients = {client for client in self._clients if not client.lost}
        self._notify()

    def _update_replica(self, state: ReplicaState) -> None:
        replica = self._replicas.get(state.id)
        if state.status == "ready" and (replica is None or replica.client.lost):
            client = WorkerClient(state.address, tls=self._tls, on_change=self._notify)
            client.start()
            self._clients.add(client)
            self._replicas[state.id] = _Replica(state, client)
        elif replica is not None:
            begins = state.status == "draining" and replica.state.status != "draining"
            replica.state = state
            if begins:
                loop = asyncio.get_running_loop()
                replica.drained_at = loop.time() + state.grace
                if state.grace < 1e6:  # a model that is evicted while it is in use has no limit
                    loop.call_later(state.grace, self._move_requests)

    def _notify(self) -> None:
        """Wake all waiters to look at the state again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if (info := self._info()) is not None:
            self._on_loaded(info)
        self._move_requests()
        for replica in self._replicas.values():
            if replica.state.status == "ready" and not replica.client.ready and not replica.checked:
                replica.checked = True
                asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self._check_connection, replica)

    def _check_connection(self, replica: _Replica) -> None:
        """Ask the supervisor for the state of a replica whose connection is lost: the answer makes another one."""
        replica.checked = False
        if replica.client.lost and not replica.ended and not self._closed:
            self._send(msgspec.structs.replace(self._acquire, opportunistic=True))

    def _info(self) -> ModelInfo | None:
        """Return the facts of the usable replica with the shortest context: it depends on the memory of each."""
        infos = [each.client.info for each in self._replicas.values() if each.usable and each.client.info is not None]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    # Requests

    async def wait_ready(self) -> ModelInfo:
        await self._wait_usable()
        info = self._info()
        assert info is not None
        return info

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        """Run a request. When its replica is drained, dies or hangs, it goes on at another one.

        A request that was being computed when its worker died is computed alone up to its next token. At the second
        time it raises `RequestSuspected`; if it was alone then, so do all that are equal to it.
        """
        if request.id in self._runs:
            raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
        request = msgspec.structs.replace(request, fingerprint=fingerprint(request))
        run = self._runs[request.id] = _Run(request, on_delta)
        try:
            while not await self._run_once(run):
                pass
        finally:
            del self._runs[request.id]

    async def _run_once(self, run: _Run) -> bool:
        """Run a request on one replica. Return whether it has ended; otherwise it is to be run on the next one."""
        await self._wait_usable(begun=run.progress.begun)
        crashes = self._crashes(run.request)
        level = min(max(crashes, run.hangs), len(ISOLATION) - 1)
        request = run.progress.next_request(ISOLATION[level])
        if not request.open_choices:
            return True
        candidates = self._candidates(run)
        assignment = self._router.choose(routing_key(request), list(candidates))
        replica = run.replica = candidates[assignment.replica]
        if len(candidates) > 1:
            self._on_route(assignment.cached > 0)
        if run.left is not None and not run.counted:
            reason, previous = run.left
            run.counted = True
            self._on_move(reason, previous == replica.state.fingerprint)
        try:
            await replica.client.submit(request, run.progress.handle)
        except EngineOverloaded:
            if run.left is None:
                raise
            await asyncio.sleep(OVERLOADED_SECONDS)  # it was accepted before: it waits for a place
            return False
        except Moved as moved:
            run.left, run.counted = (moved.reason, replica.state.fingerprint), False
            run.silences += moved.reason == "silence"
            run.hangs += moved.reason == "silence" and replica.state.status == "hanging"
            return False
        except WorkerLost:
            if self._closed:
                raise
            announced = replica.state.status == "draining"
            run.left, run.counted = ("drain" if announced else "crash", replica.state.fingerprint), False
            await self._wait_for_report(replica)
            if not announced:
                if not replica.ended:
                    self._send(self._acquire)  # the connection broke: the answer makes another one
                run.retries += 1
                if self._crashes(run.request) > 1:
                    raise RequestSuspected(SUSPECTED) from None
                if run.retries > MAX_RETRIES:
                    raise
            return False
        finally:
            run.replica = None
            self._router.release(assignment)
        if run.request.fingerprint in self.suspects:
            self._send(ClearSuspect(self._key, run.request.fingerprint))
        return True

    def _candidates(self, run: _Run) -> dict[str, _Replica]:
        """Return the replicas that may run a request: with a long enough context, if there are any.

        One that has begun needs equal outputs, if there are any.
        """
        usable = {id: each for id, each in self._replicas.items() if each.usable}
        need = len(run.request.prompt) + run.request.stopping.max_tokens
        usable = {id: each for id, each in usable.items() if _context(each) >= need} or usable
        if run.left is None or not run.progress.begun:
            return usable
        equal = {id: each for id, each in usable.items() if each.state.fingerprint == run.left[1]}
        return equal or usable

    def _crashes(self, request: EngineRequest) -> int:
        """Return the number of crashes at which a request was computed. Raises `RequestSuspected`."""
        crashes = self.suspects.get(request.fingerprint, 0)
        if crashes == REFUSED:
            raise RequestSuspected(SUSPECTED)
        return crashes

    async def _wait_for_report(self, replica: _Replica) -> None:
        """Wait until the supervisor has reported the end of a replica, and with it the requests that are suspected."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while not replica.ended and not self._closed:
                    await self._changed.wait()

    def _move_requests(self) -> None:
        """Take from their replicas the requests that should go on elsewhere."""
        for run in list(self._runs.values()):
            if run.replica is not None and (reason := self._move_reason(run, run.replica)) is not None:
                run.replica.client.interrupt(run.request.id, Moved(reason))

    def _move_reason(self, run: _Run, replica: _Replica) -> MoveReason | None:
        others = any(each.usable for each in self._replicas.values() if each is not replica)
        if replica.drained_at is not None and replica.state.status == "draining":
            left = replica.drained_at - asyncio.get_running_loop().time()
            leaves = replica.client.silent or not run.progress.fits(left)
            return "drain" if left <= CLOCK_SECONDS or (others and leaves) else None
        hangs = replica.state.status == "hanging" or replica.client.silent
        # One that has moved before may be the cause: it waits until the supervisor has ended the worker.
        return "silence" if hangs and others and not run.silences and not run.retries else None

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if (run := self._runs.get(request_id)) is not None:
            run.progress.abort(choice)
            if run.replica is not None:
                run.replica.client.abort(request_id, choice)

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
        self._closed = True
        self._notify()
        await asyncio.gather(*(client.close() for client in self._clients))

    # Waiting for a replica

    async def _wait_usable(self, *, begun: bool = False) -> None:
        """Wait until there is a usable replica; one is acquired if there is none.

        `begun`: for a request that has begun. As in the queue of a worker, it does not end by `queue_timeout`.
        """
        if self.ready:
            return
        try:
            async with asyncio.timeout(self._load_timeout or None):
                await self._acquire_replica(begun)
        except TimeoutError:
            why = f": {self._reason}" if self._reason and self.status != "failed" else ""
            raise self._unavailable(f"could not be loaded within {self._load_timeout:g} seconds{why}") from None

    async def _acquire_replica(self, begun: bool) -> None:
        acquired_at = -1
        began = asyncio.get_running_loop().time()
        while True:
            if self._closed:
                raise self._unavailable("is not loaded: the server is being stopped")
            if self.ready:
                return
            if self.removed:
                raise self._unavailable("is no longer configured")
            if acquired_at < 0 or (self.status == "cold" and self._updates > acquired_at):
                self._send(self._acquire)
                acquired_at = self._updates
            elif self.status == "failed" and self._updates > acquired_at:
                raise self._unavailable("cannot be loaded: the log of the server has the reason")
            limited = self._queue_timeout and not self._starting and not begun
            limit = began + self._queue_timeout if limited else None
            try:
                async with asyncio.timeout_at(limit):
                    await self._changed.wait()
            except TimeoutError:
                waited = f"within {self._queue_timeout:g} seconds"
                raise self._unavailable(f"has no replica, and there was no capacity for one {waited}") from None

    def _unavailable(self, problem: str) -> EngineUnavailable:
        return EngineUnavailable(f"The model {self.name!r} {problem}", code="model_unavailable")


def _context(replica: _Replica) -> int:
    info = replica.client.info
    return info.max_model_len if info is not None else 0
