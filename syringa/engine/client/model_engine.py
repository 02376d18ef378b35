"""The engine of one model: routes requests to its replicas, and moves them when a replica drains, dies or hangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence

import msgspec

from syringa.cluster.tls import TlsFiles
from syringa.engine.client.moves import Moved
from syringa.engine.client.router import ReplicaRouter, embedding_key, routing_key
from syringa.engine.client.runs import ConnectedReplica, EmbeddingRun, GenerationRun, QueueTime
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
from syringa.engine.processes.suspects import REFUSED, embedding_fingerprint, fingerprint
from syringa.engine.vllm.resume import resume_error, unresumable_fields
from syringa.errors import (
    OUT_OF_MEMORY_CODE,
    EngineOverdue,
    EngineOverloaded,
    EngineUnavailable,
    InvalidRequest,
    RequestSuspected,
    WorkerLost,
)
from syringa.types import EmbeddingRequest, EmbeddingResult, EngineRequest, EngineStats, Isolation, ModelInfo

Send = Callable[[SupervisorRequest], None]
OnMove = Callable[[MoveReason, bool], None]
"""Called with each move: its reason, and whether the new replica has the fingerprint of the old one."""
OnRoute = Callable[[bool], None]
"""Called with each choice among several replicas: whether one has served a prefix of the prompt."""

CLOCK_SECONDS = 0.01  # a timer of the event loop may end that much too early
OVERLOADED_SECONDS = 0.2  # until a moved request is submitted again to a replica with a full queue
BALANCE_SECONDS = 1.0  # after which requests that came before a replica was ready, and have not begun, move to it
RECONNECT_SECONDS = 1.0  # after which a lost connection is made again
REPORT_SECONDS = 2.0  # for the supervisor to report that a worker has died
MAX_RETRIES = 3  # of a request after crashes; announced moves are not limited
SUSPECTED = "The model worker ended twice while it computed this request: it is not run again."
ISOLATION: tuple[Isolation, ...] = ("none", "start", "full")  # by the number of crashes


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
        self._replicas: dict[str, ConnectedReplica] = {}
        self._clients: set[WorkerClient] = set()  # all that may be connected, to be closed at the end
        self._router = ReplicaRouter()
        self._stats = ReplicaStats()
        self._runs: dict[str, GenerationRun] = {}  # by request id
        self._embedding_runs: dict[str, EmbeddingRun] = {}
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
        self._router.retain(self._replicas.keys())
        self._clients = {client for client in self._clients if not client.lost}
        self._notify()

    def _update_replica(self, state: ReplicaState) -> None:
        replica = self._replicas.get(state.id)
        if state.status == "ready" and (replica is None or replica.client.lost):
            client = WorkerClient(state.address, tls=self._tls, on_change=self._notify)
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
                    loop.call_later(state.grace, self._move_requests)

    def _notify(self) -> None:
        """Wake all waiters to look at the state again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if (info := self._info()) is not None:
            self._on_loaded(info)
        self._move_requests()
        for replica in self._replicas.values():
            if replica.usable and not replica.joined:
                replica.joined = True
                if waiting := [run for run in self._runs.values() if run.assignment and not run.progress.begun]:
                    asyncio.get_running_loop().call_later(BALANCE_SECONDS, self._balance, replica, waiting)
            if replica.state.status == "ready" and not replica.client.ready and not replica.checked:
                replica.checked = True
                asyncio.get_running_loop().call_later(RECONNECT_SECONDS, self._check_connection, replica)

    def _check_connection(self, replica: ConnectedReplica) -> None:
        """Ask the supervisor for the state of a replica whose connection is lost: the answer makes another one."""
        replica.checked = False
        if replica.client.lost and not replica.ended and not self._closed:
            self._send(msgspec.structs.replace(self._acquire, opportunistic=True))

    def _balance(self, replica: ConnectedReplica, runs: Sequence[GenerationRun]) -> None:
        """Let a new replica run requests that still wait at busy ones."""
        if not replica.usable:
            return
        waiting = [(run, run.assignment) for run in runs if run.assignment is not None and not run.progress.begun]
        for position in self._router.shed([assignment for _, assignment in waiting], replica.state.id):
            run = waiting[position][0]
            if run.replica is not None:
                run.target = replica.state.id
                run.replica.client.interrupt(run.request.id, Moved("balance"))

    def _info(self) -> ModelInfo | None:
        """Return the facts of the usable replica with the shortest context: it depends on the memory of each."""
        infos = [each.client.info for each in self._replicas.values() if each.usable and each.client.info is not None]
        return min(infos, key=lambda info: info.max_model_len, default=None)

    # Requests

    async def wait_ready(self, *, background: bool = False) -> ModelInfo:
        await self._wait_usable(unlimited=background)
        info = self._info()
        assert info is not None
        return info

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        """Run a request. When its replica is drained, dies or hangs, it goes on at another one.

        A request that was being computed when its worker died is computed alone up to its next token. At the second
        time it raises `RequestSuspected`; if it was alone then, so do all that are equal to it. One that cannot be
        continued elsewhere stays at its replica as long as that runs, and then raises `EngineUnavailable`.
        """
        if request.id in self._runs:
            raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
        request = msgspec.structs.replace(request, fingerprint=fingerprint(request))
        unresumable = unresumable_fields(request) if self._acquire.options.engine == "vllm" else ()
        run = self._runs[request.id] = GenerationRun(
            request, on_delta, unresumable, self._acquire.options.queue_timeout
        )
        try:
            while not await self._run_once(run):
                pass
        finally:
            del self._runs[request.id]

    async def _run_once(self, run: GenerationRun) -> bool:
        """Run a request on one replica. Return whether it has ended; otherwise it is to be run on the next one."""
        if run.bound:  # it has left its replica
            raise resume_error(run.unresumable)
        begun = run.progress.begun
        await self._wait_usable(None if begun else run.queue, unlimited=begun or run.request.background)
        crashes = self._crashes(run.request)
        level = min(max(crashes, run.hangs), len(ISOLATION) - 1)
        request = run.progress.next_request(ISOLATION[level])
        if not request.open_choices:
            return True
        candidates = self._candidates(run)
        assignment = self._router.choose(routing_key(request), list(candidates))
        replica = run.replica = candidates[assignment.replica]
        run.assignment, run.target = assignment, ""
        if len(candidates) > 1:
            self._on_route(assignment.cached > 0)
        if run.left is not None and not run.counted:
            reason, previous = run.left
            run.counted = True
            self._on_move(reason, previous == replica.state.fingerprint)
        try:
            with run.queue.count():
                await replica.client.submit(
                    msgspec.structs.replace(request, waited=run.queue.counted), run.progress.handle
                )
        except EngineOverloaded as error:
            if run.left is None or (not run.progress.begun and _is_final(error, run.queue)):
                raise
            with run.queue.count():
                await asyncio.sleep(OVERLOADED_SECONDS)  # it was accepted before: it waits for a place
            return False
        except Moved as moved:
            run.left, run.counted = (moved.reason, replica.state.fingerprint), False
            run.silences += moved.reason == "silence"
            run.hangs += moved.reason == "silence" and replica.state.status == "hanging"
            return False
        except WorkerLost as lost:
            if self._closed:
                raise
            announced = replica.state.status == "draining"
            run.left, run.counted = ("drain" if announced else "crash", replica.state.fingerprint), False
            await self._check_retry(run, replica, lost, announced=announced)
            return False
        finally:
            run.replica = run.assignment = None
            self._router.release(assignment)
        if run.request.fingerprint in self.suspects:
            self._send(ClearSuspect(self._key, run.request.fingerprint))
        return True

    async def embed(self, request: EmbeddingRequest) -> EmbeddingResult:
        """Compute embeddings. When the replica is drained, dies or hangs, the request begins again at another one.

        As in `submit`, a request that was being computed when its worker died is computed alone, and at the second time
        raises `RequestSuspected`.
        """
        if request.id in self._embedding_runs:
            raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
        request = msgspec.structs.replace(request, fingerprint=embedding_fingerprint(request))
        run = self._embedding_runs[request.id] = EmbeddingRun(request, self._acquire.options.queue_timeout)
        try:
            while (result := await self._embed_once(run)) is None:
                pass
        finally:
            del self._embedding_runs[request.id]
        return result

    async def _embed_once(self, run: EmbeddingRun) -> EmbeddingResult | None:
        """Run a request on one replica. Return None if it is to be run on the next one."""
        await self._wait_usable(run.queue, unlimited=run.request.background)
        isolated = self._crashes(run.request) > 0
        request = msgspec.structs.replace(run.request, isolated=isolated, waited=run.queue.counted)
        usable = {id: each for id, each in self._replicas.items() if each.usable}
        assignment = self._router.choose(embedding_key(request), list(usable))
        replica = run.replica = usable[assignment.replica]
        try:
            with run.queue.count():
                result = await replica.client.embed(request)
        except EngineOverloaded as error:
            if (not run.moves and not run.retries) or _is_final(error, run.queue):
                raise
            with run.queue.count():
                await asyncio.sleep(OVERLOADED_SECONDS)  # it was accepted before: it waits for a place
            return None
        except Moved as moved:
            run.moves += 1
            self._on_move(moved.reason, False)
            return None
        except WorkerLost as lost:
            if self._closed:
                raise
            announced = replica.state.status == "draining"
            self._on_move("drain" if announced else "crash", False)
            await self._check_retry(run, replica, lost, announced=announced)
            return None
        finally:
            run.replica = None
            self._router.release(assignment)
        if run.request.fingerprint in self.suspects:
            self._send(ClearSuspect(self._key, run.request.fingerprint))
        return result

    async def _check_retry(
        self, run: GenerationRun | EmbeddingRun, replica: ConnectedReplica, lost: WorkerLost, *, announced: bool
    ) -> None:
        """Wait for what the supervisor reports of a lost replica. Raises if its request is not to be run again."""
        await self._wait_for_report(replica)
        if announced:
            return
        if not self._is_settled(replica):
            self._send(self._acquire)  # the connection broke: the answer makes another one
        run.retries += 1
        if self._crashes(run.request) > 1:
            raise RequestSuspected(SUSPECTED) from None
        if run.retries > MAX_RETRIES:
            raise lost

    def _candidates(self, run: GenerationRun) -> dict[str, ConnectedReplica]:
        """Return the replicas that may run a request: with a long enough context, if there are any.

        One that has begun needs equal outputs, if there are any.
        """
        usable = {id: each for id, each in self._replicas.items() if each.usable}
        need = len(run.request.prompt) + run.request.stopping.max_tokens
        usable = {id: each for id, each in usable.items() if _context(each) >= need} or usable
        if run.target in usable:
            return {run.target: usable[run.target]}
        if run.left is None or not run.progress.begun:
            return usable
        equal = {id: each for id, each in usable.items() if each.state.fingerprint == run.left[1]}
        return equal or usable

    def _crashes(self, request: EngineRequest | EmbeddingRequest) -> int:
        """Return the number of crashes at which a request was computed. Raises `RequestSuspected`."""
        crashes = self.suspects.get(request.fingerprint, 0)
        if crashes == REFUSED:
            raise RequestSuspected(SUSPECTED)
        return crashes

    async def _wait_for_report(self, replica: ConnectedReplica) -> None:
        """Wait until the supervisor has reported the end of a replica, and with it the requests that are suspected.

        Ends early if it turns out that only the connection was lost.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REPORT_SECONDS):
                while not self._is_settled(replica) and not self._closed:
                    await self._changed.wait()

    def _is_settled(self, replica: ConnectedReplica) -> bool:
        """Return whether a lost replica has ended or is connected again."""
        current = self._replicas.get(replica.state.id)
        return current is None or (current is not replica and current.client.ready)

    def _move_requests(self) -> None:
        """Take from their replicas the requests that should go on elsewhere."""
        for run in list(self._runs.values()):
            if run.replica is not None and (reason := self._move_reason(run, run.replica)) is not None:
                run.replica.client.interrupt(run.request.id, Moved(reason))
        for embedding in list(self._embedding_runs.values()):
            if embedding.replica is not None and (reason := self._embedding_move(embedding, embedding.replica)):
                embedding.replica.client.interrupt(embedding.request.id, Moved(reason))

    def _move_reason(self, run: GenerationRun, replica: ConnectedReplica) -> MoveReason | None:
        others = any(each.usable for each in self._replicas.values() if each is not replica)
        if replica.drained_at is not None and replica.state.status == "draining":
            left = replica.drained_at - asyncio.get_running_loop().time()
            leaves = not run.bound and (replica.client.silent or not run.progress.fits(left))
            return "drain" if left <= CLOCK_SECONDS or (others and leaves) else None
        if run.bound and not replica.ended:
            return None
        if replica.ended and replica.client.silent:  # its machine may keep the connection open for ever
            return "silence" if others else None
        hangs = replica.state.status == "hanging" or replica.client.silent
        # One that has moved before may be the cause: it waits until the supervisor has ended the worker.
        return "silence" if hangs and others and not run.silences and not run.retries else None

    def _embedding_move(self, run: EmbeddingRun, replica: ConnectedReplica) -> MoveReason | None:
        """Return why a request for embeddings should begin again elsewhere. It is short: a drain waits for it."""
        if replica.drained_at is not None and replica.state.status == "draining":
            return "drain" if replica.drained_at - asyncio.get_running_loop().time() <= CLOCK_SECONDS else None
        others = any(each.usable for each in self._replicas.values() if each is not replica)
        if replica.ended and replica.client.silent:
            return "silence" if others else None
        hangs = replica.state.status == "hanging" or replica.client.silent
        return "silence" if hangs and others and not run.moves and not run.retries else None

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

    async def _wait_usable(self, queue: QueueTime | None = None, *, unlimited: bool = False) -> None:
        """Wait until there is a usable replica; one is acquired if there is none.

        `queue`: how long the request has waited before; the time in which no replica is being started is added.
        `unlimited`: for a request that has begun, or that runs in the background. As in the queue of a worker, it does
        not end by `queue_timeout`.
        """
        if self.ready:
            return
        try:
            async with asyncio.timeout(self._load_timeout or None):
                await self._acquire_replica(queue or QueueTime(0), unlimited)
        except TimeoutError:
            problem = f"could not be loaded within {self._load_timeout:g} seconds{self._why()}"
            raise self._unavailable(problem) from None

    async def _acquire_replica(self, queue: QueueTime, unlimited: bool) -> None:
        acquired_at = -1
        began = asyncio.get_running_loop().time() - queue.counted
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
        return EngineUnavailable(f"The model {self.name!r} {problem}", code="model_unavailable")


def _is_final(error: EngineOverloaded, queue: QueueTime) -> bool:
    """Return whether a request that has moved is refused for good, and has not only met a full queue."""
    return isinstance(error, EngineOverdue) or error.code == OUT_OF_MEMORY_CODE or queue.exceeded


def _context(replica: ConnectedReplica) -> int:
    info = replica.client.info
    return info.max_model_len if info is not None else 0
