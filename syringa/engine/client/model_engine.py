"""The engine of one model: routes requests to its replicas, and moves them when a replica drains, dies or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import msgspec

from syringa.cluster.tls import TlsFiles
from syringa.engine.client.model_replicas import ModelReplicas, Send
from syringa.engine.client.moves import Moved
from syringa.engine.client.router import ReplicaRouter, embedding_key, routing_key
from syringa.engine.client.runs import ConnectedReplica, EmbeddingRun, GenerationRun, QueueTime
from syringa.engine.interface import DeltaHandler, LoadStatus, MoveReason, ReadyModel
from syringa.engine.processes.control import (
    AcquireModel,
    ClearSuspect,
    WorkerState,
    worker_key,
)
from syringa.engine.processes.suspects import REFUSED, embedding_fingerprint, fingerprint
from syringa.engine.vllm.resume import resume_error, unresumable_fields
from syringa.errors import (
    OUT_OF_MEMORY_CODE,
    EngineOverdue,
    EngineOverloaded,
    InvalidRequest,
    RequestSuspected,
    WorkerLost,
)
from syringa.types import EmbeddingRequest, EmbeddingResult, EngineRequest, EngineStats, Isolation, ModelInfo

OnMove = Callable[[MoveReason, bool], None]
"""Called with each move: its reason, and whether the new replica has the fingerprint of the old one."""
OnRoute = Callable[[bool], None]
"""Called with each choice among several replicas: whether one has served a prefix of the prompt."""

CLOCK_SECONDS = 0.01  # a timer of the event loop may end that much too early
OVERLOADED_SECONDS = 0.2  # until a moved request is submitted again to a replica with a full queue
BALANCE_SECONDS = 1.0  # after which requests that came before a replica was ready, and have not begun, move to it
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
        self.replicas = ModelReplicas(
            name,
            acquire,
            send,
            load_timeout,
            on_loaded,
            self._handle_change,
            queue_timeout=queue_timeout,
            tls=tls,
        )
        self.suspects: Mapping[bytes, int] = {}  # requests that were running at crashes, see `SuspectTable.levels`
        self._key = worker_key(acquire.options)
        self._send, self._on_move, self._on_route = send, on_move, on_route
        self._router = ReplicaRouter()
        self._runs: dict[str, GenerationRun] = {}  # by request id
        self._embedding_runs: dict[str, EmbeddingRun] = {}

    @property
    def ready(self) -> bool:
        return self.replicas.ready

    @property
    def status(self) -> LoadStatus:
        return self.replicas.status

    def update(self, state: WorkerState) -> None:
        """Apply a state that the supervisor reports of the model."""
        self.replicas.update(state)

    async def wait_ready(self, *, background: bool = False) -> ReadyModel:
        queue = QueueTime()
        await self.replicas.wait_usable(queue, unlimited=background)
        info = self.replicas.info()
        assert info is not None
        return ReadyModel(info, queue.waited)

    async def stats(self) -> EngineStats:
        return await self.replicas.stats()

    async def close(self) -> None:
        await self.replicas.close()

    async def submit(self, request: EngineRequest, on_delta: DeltaHandler) -> None:
        """Run a request. When its replica is drained, dies or hangs, it goes on at another one.

        A request that was being computed when its worker died is computed alone up to its next token. At the second
        time it raises `RequestSuspected`; if it was alone then, so do all that are equal to it. One that cannot be
        continued elsewhere stays at its replica as long as that runs, and then raises `EngineUnavailable`.
        """
        if request.id in self._runs:
            raise InvalidRequest(f"A request with the id {request.id!r} is running already.")
        request = msgspec.structs.replace(request, fingerprint=fingerprint(request))
        unresumable = unresumable_fields(request) if self.replicas.acquire.options.engine == "vllm" else ()
        run = self._runs[request.id] = GenerationRun(
            request, on_delta, unresumable, self.replicas.acquire.options.queue_timeout
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
        await self.replicas.wait_usable(None if begun else run.queue, unlimited=begun or run.request.background)
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
            if self.replicas.closed:
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
        run = self._embedding_runs[request.id] = EmbeddingRun(request, self.replicas.acquire.options.queue_timeout)
        try:
            while (result := await self._embed_once(run)) is None:
                pass
        finally:
            del self._embedding_runs[request.id]
        return result

    async def _embed_once(self, run: EmbeddingRun) -> EmbeddingResult | None:
        """Run a request on one replica. Return None if it is to be run on the next one."""
        await self.replicas.wait_usable(run.queue, unlimited=run.request.background)
        isolated = self._crashes(run.request) > 0
        request = msgspec.structs.replace(run.request, isolated=isolated, waited=run.queue.counted)
        usable = self.replicas.usable
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
            if self.replicas.closed:
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
        await self.replicas.wait_for_report(replica)
        if announced:
            return
        if not self.replicas.is_settled(replica):
            self._send(self.replicas.acquire)  # the connection broke: the answer makes another one
        run.retries += 1
        if self._crashes(run.request) > 1:
            raise RequestSuspected(SUSPECTED) from None
        if run.retries > MAX_RETRIES:
            raise lost

    def _candidates(self, run: GenerationRun) -> dict[str, ConnectedReplica]:
        """Return the replicas that may run a request: with a long enough context, if there are any.

        One that has begun needs equal outputs, if there are any.
        """
        usable = self.replicas.usable
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

    # Moving requests

    def _handle_change(self, joined: Sequence[ConnectedReplica]) -> None:
        """Move requests after a change of the replicas, of which some were never usable before."""
        self._router.retain(self.replicas.ids)
        self._move_requests()
        for replica in joined:
            if waiting := [run for run in self._runs.values() if run.assignment and not run.progress.begun]:
                asyncio.get_running_loop().call_later(BALANCE_SECONDS, self._balance, replica, waiting)

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

    def _move_requests(self) -> None:
        """Take from their replicas the requests that should go on elsewhere."""
        for run in list(self._runs.values()):
            if run.replica is not None and (reason := self._move_reason(run, run.replica)) is not None:
                run.replica.client.interrupt(run.request.id, Moved(reason))
        for embedding in list(self._embedding_runs.values()):
            if embedding.replica is not None and (reason := self._embedding_move(embedding, embedding.replica)):
                embedding.replica.client.interrupt(embedding.request.id, Moved(reason))

    def _move_reason(self, run: GenerationRun, replica: ConnectedReplica) -> MoveReason | None:
        others = self.replicas.has_other(replica)
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
        others = self.replicas.has_other(replica)
        if replica.ended and replica.client.silent:
            return "silence" if others else None
        hangs = replica.state.status == "hanging" or replica.client.silent
        return "silence" if hangs and others and not run.moves and not run.retries else None

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if (run := self._runs.get(request_id)) is not None:
            run.progress.abort(choice)
            if run.replica is not None:
                run.replica.client.abort(request_id, choice)


def _is_final(error: EngineOverloaded, queue: QueueTime) -> bool:
    """Return whether a request that has moved is refused for good, and has not only met a full queue."""
    return isinstance(error, EngineOverdue) or error.code == OUT_OF_MEMORY_CODE or queue.exceeded


def _context(replica: ConnectedReplica) -> int:
    info = replica.client.info
    return info.max_model_len if info is not None else 0
