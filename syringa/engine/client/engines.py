"""The API process's side of the model workers: an engine for each model, whose worker comes and goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.client.worker_client import WorkerClient, WorkerLost
from syringa.engine.interface import Engine, Status, Take
from syringa.engine.processes.control import Drop, State, ToSupervisor, Want, api_frames, key_of
from syringa.engine.worker.server import WorkerOptions
from syringa.errors import EngineUnavailable
from syringa.types import EngineRequest, EngineStats, ModelInfo

Send = Callable[[ToSupervisor], None]


class LocalEngine:
    """The engine of one model. It asks the supervisor for a worker when somebody waits for one."""

    def __init__(self, name: str, want: Want, send: Send, patience: float, loaded: Callable[[ModelInfo], None]) -> None:
        """`patience`: seconds that a request waits for the model; 0: as long as it takes."""
        self.name, self.want = name, want
        self.status: Status = "cold"
        self._send, self._patience, self._loaded = send, patience, loaded
        self._reason = ""
        self._client: WorkerClient | None = None
        self._leaving = ""  # the socket of a worker that was asked to leave
        self._told = 0  # how often the supervisor has said how it is
        self._change = asyncio.Event()
        self._closed = False
        self.dropped = False  # its model is no longer configured

    @property
    def ready(self) -> bool:
        return self.status == "loaded" and self._client is not None and self._client.ready

    def tell(self, state: State) -> None:
        """What the supervisor says of the worker."""
        self.status, self._reason = state.status, state.reason
        self._told += 1
        if state.status != "loaded":
            self._leaving = state.socket or self._leaving
        else:
            self._leaving = ""
            if self._client is None or self._client.path != state.socket:
                self._client = WorkerClient(state.socket, changed=self._pulse)
                self._client.start()
        self._pulse()

    def _pulse(self) -> None:
        """Whoever waits looks again."""
        change, self._change = self._change, asyncio.Event()
        change.set()
        if self.ready and self._client is not None and self._client.info is not None:
            self._loaded(self._client.info)

    async def wait_ready(self) -> ModelInfo:
        client = await self._worker()
        assert client.info is not None
        return client.info

    async def submit(self, request: EngineRequest, take: Take) -> None:
        """A request that a worker had not begun on when it was asked to leave goes to the next one."""
        while True:
            client = await self._worker()
            try:
                await client.submit(request, take)
                return
            except WorkerLost as lost:
                if lost.begun or client.path != self._leaving:
                    raise

    def abort(self, request_id: str, choice: int | None = None) -> None:
        if self._client is not None:
            self._client.abort(request_id, choice)

    async def stats(self) -> EngineStats:
        if self._client is None or not self.ready:
            raise self._unavailable("is not loaded")
        return await self._client.stats()

    async def close(self) -> None:
        self._closed = True
        self._pulse()
        if self._client is not None:
            await self._client.close()

    async def _worker(self) -> WorkerClient:
        """The client of a worker that is ready, which is asked for if there is none."""
        if self._client is not None and self.ready:
            return self._client
        try:
            async with asyncio.timeout(self._patience or None):
                return await self._wait()
        except TimeoutError:
            why = f": {self._reason}" if self._reason else ""
            raise self._unavailable(f"could not be loaded within {self._patience:g} seconds{why}") from None

    async def _wait(self) -> WorkerClient:
        asked = -1
        while True:
            if self._closed:
                raise self._unavailable("is not loaded: the server is being stopped")
            if self._client is not None and self.ready:
                return self._client
            if self.dropped:
                raise self._unavailable("is no longer configured")
            if asked < 0 or (self.status == "cold" and self._told > asked):
                self._send(self.want)
                asked = self._told
            elif self.status == "failed" and self._told > asked:
                raise self._unavailable(f"cannot be loaded: {self._reason}")
            await self._change.wait()

    def _unavailable(self, said: str) -> EngineUnavailable:
        return EngineUnavailable(f"The model {self.name!r} {said}", code="model_unavailable")


class LocalFleet:
    """The engines of the models that this machine runs. Call `start` inside the event loop, `close` at the end."""

    def __init__(self, path: str, config: Config) -> None:
        """`path`: the supervisor's control socket."""
        self.loaded: Callable[[str, ModelInfo], None] = lambda model, info: None  # who wants to know is set here
        self._path, self._config = path, config
        self._wants: dict[str, tuple[str, Want]] = {}  # by model, with the key of its worker
        self._engines: dict[str, LocalEngine] = {}  # by the worker's key
        self._states: dict[str, State] = {}
        self._unsent: list[ToSupervisor] = []
        self._transport: asyncio.WriteTransport | None = None
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Control(self._take, self._lost), self._path
        )
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's are not declared as such
        for message in self._unsent:
            self._send(message)
        self._unsent.clear()

    def set_specs(self, specs: Sequence[ModelSpec]) -> None:
        """These are the models from now on. Those to be preloaded are, and the workers of those that are gone leave."""
        before = {key for key, _ in self._wants.values()}
        wants = {spec.id: _want(spec, self._config) for spec in specs}
        self._wants = {model: (key_of(want.options), want) for model, want in wants.items()}
        now = {key for key, _ in self._wants.values()}
        for key, engine in self._engines.items():
            engine.dropped = key not in now
        for key in before - now:
            self._send(Drop(key))
        for key, want in self._wants.values():
            if want.keep and key not in before:
                self._send(msgspec.structs.replace(want, soft=True))

    def engine(self, model: str) -> Engine:
        try:
            key, want = self._wants[model]
        except KeyError:
            said = f"The model {model!r} is no longer configured"
            raise EngineUnavailable(said, code="model_unavailable") from None
        engine = self._engines.get(key)
        if engine is None:
            patience = self._config.load_timeout
            engine = self._engines[key] = LocalEngine(model, want, self._send, patience, self._learned(key))
            if state := self._states.get(key):
                engine.tell(state)
        return engine

    def status(self, model: str) -> Status:
        key, _ = self._wants.get(model, ("", None))
        state = self._states.get(key)
        return state.status if state else "cold"

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
        if self._transport is not None:
            self._transport.close()

    def _learned(self, key: str) -> Callable[[ModelInfo], None]:
        def learned(info: ModelInfo) -> None:
            for model, (own, _) in self._wants.items():
                if own == key:
                    self.loaded(model, info)

        return learned

    def _send(self, message: ToSupervisor) -> None:
        if self._transport is None:
            self._unsent.append(message)
        else:
            self._transport.write(protocol.frame(message))

    def _take(self, state: State) -> None:
        self._states[state.key] = state
        if engine := self._engines.get(state.key):
            engine.tell(state)
            if engine.dropped and state.status == "cold" and not state.socket:
                del self._engines[state.key], self._states[state.key]

    def _lost(self) -> None:
        """The supervisor is gone, and this process is about to be."""
        for engine in self._engines.values():
            task = asyncio.ensure_future(engine.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Control(asyncio.Protocol):
    def __init__(self, take: Callable[[State], None], lost: Callable[[], None]) -> None:
        self._take, self._lost = take, lost
        self._frames = api_frames()

    def data_received(self, data: bytes) -> None:
        for state in self._frames.feed(data):
            self._take(state)

    def connection_lost(self, error: Exception | None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed already
            self._lost()


def _want(spec: ModelSpec, config: Config) -> Want:
    options = WorkerOptions.of(spec, config)
    return Want(options, spec.idle_seconds or 0.0, keep=bool(spec.preload), name=spec.id)
