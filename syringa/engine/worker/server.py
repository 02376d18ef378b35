"""The process of one loaded model: `python -m syringa.engine.worker.server`, started by the supervisor.

One thread does everything in turn (receive, step, send), so nothing needs a lock; only grammars are compiled and images
prepared beside it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
from typing import TYPE_CHECKING, Literal

import msgspec

from syringa import logs
from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.cpu.features import NO_MEMORY, guard_against_amx, release_memory
from syringa.engine.processes import managed_process
from syringa.engine.scheduling.oom import NO_GPU_MEMORY, is_shortage
from syringa.engine.worker.progress import progress_bar
from syringa.errors import EngineOverloaded, StartupError, SyringaError
from syringa.types import EngineDelta

if TYPE_CHECKING:
    from syringa.engine.worker.core import EngineCore

logger = logging.getLogger("syringa.worker")

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 8192
READ_SIZE = 1 << 20
MOST_UNSENT = 64 << 20


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker needs to know; the part of `Config` that is about the model."""

    socket: str
    model: str
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    deterministic: bool = False
    threads: int = 0
    max_model_len: int = 0
    kv_cache_tokens: int = 0
    kv_cache_gb: float = 0.0
    gpu_memory_fraction: float = 0.0
    prefix_caching: bool = True
    max_running: int = 256
    max_queue: int = 1024
    queue_timeout: float = 0.0
    step_tokens: int = 0  # 0: what suits the device
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"

    @classmethod
    def of(cls, spec: ModelSpec, config: Config, socket: str = "") -> WorkerOptions:
        """What is said of the model, and for the rest what is said of all."""
        names = [name for name in cls.__struct_fields__ if name not in ("socket", "model")]
        shared = {name: getattr(spec if hasattr(spec, name) else config, name) for name in names}
        return cls(socket=socket, model=spec.path, **shared)

    @property
    def reason_file(self) -> str:
        """Where a worker that cannot load its model leaves the reason."""
        return self.socket + ".reason"


class Client:
    """One connected API process."""

    def __init__(self, number: int, connection: socket.socket) -> None:
        self.number = number
        self.connection = connection
        self.frames = protocol.worker_frames()
        self.unsent = bytearray()


class Worker:
    """Serves one `EngineCore` to any number of API processes."""

    def __init__(self, core: EngineCore, ready: protocol.Ready, listener: socket.socket) -> None:
        self.core = core
        self.ready = ready
        self.listener = listener
        self.clients: dict[int, Client] = {}
        self.ending = False
        self._leaving = False
        self._count = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        core.arrivals.on_ready = self.wake

    def wake(self) -> None:
        """Ends a wait for messages. Callable from any thread and from a signal handler."""
        with contextlib.suppress(BlockingIOError):  # it is ringing already
            self._ringer.send(b"!")

    def run(self) -> None:
        while not self.ending:
            self.receive()
            self.send(self.core.step())
            self.refuse()
            if self._leaving and self._idle_for() is not None:
                self.ending = True

    def receive(self) -> None:
        """Takes what has come; waits for something if there is nothing to compute."""
        for key, _ in self._selector.select(self.core.patience):
            if key.fileobj is self.listener:
                self._accept()
            elif key.fileobj is self._bell:
                self._bell.recv(4096)
            else:
                self._read(key.data)

    def send(self, deltas: list[tuple[int, EngineDelta]]) -> None:
        by_client: dict[int, list[EngineDelta]] = {}
        for number, delta in deltas:
            by_client.setdefault(number, []).append(delta)
        for number, own in by_client.items():
            if client := self.clients.get(number):
                client.unsent += protocol.frame_step(own)
                self._flush(client)
        for client in [client for client in self.clients.values() if client.unsent]:
            self._flush(client)

    def refuse(self) -> None:
        """Tells of requests that were taken and will not run: their images are at fault, or they waited in vain."""
        for number, request_id, error in self.core.take_refused():
            if client := self.clients.get(number):
                self._write(client, _refusal(request_id, error))

    def _accept(self) -> None:
        connection, _ = self.listener.accept()
        connection.setblocking(False)
        self._count += 1
        client = self.clients[self._count] = Client(self._count, connection)
        self._selector.register(connection, selectors.EVENT_READ, client)
        self._write(client, self.ready)

    def _read(self, client: Client) -> None:
        try:
            data = client.connection.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave(client)
            return
        for message in client.frames.feed(data):
            match message:
                case protocol.Submit(request):
                    try:
                        self.core.submit(request, client.number)
                    except SyringaError as error:
                        self._write(client, _refusal(request.id, error))
                case protocol.Abort(request_id, choice):
                    self.core.abort(request_id, choice, client.number)
                case protocol.AskStats():
                    self._write(client, protocol.Stats(self.core.stats()))
                case protocol.Retire(idle, drain):
                    self._retire(client, idle, drain)

    def _retire(self, client: Client, idle: float, drain: bool) -> None:
        """What it is asked may be out of date: nobody but this thread knows whether there is nothing to do."""
        unused = self._idle_for()
        if drain or (unused is not None and unused >= idle):
            self._leaving = True
        else:
            self._write(client, protocol.Stays(self.core.stats()))

    def _idle_for(self) -> float | None:
        """Seconds since there was something to do or to send; None: there is."""
        stats = self.core.stats()
        busy = stats.running or stats.waiting or any(client.unsent for client in self.clients.values())
        return None if busy else stats.idle_seconds

    def _write(self, client: Client, message: protocol.FromWorker) -> None:
        client.unsent += protocol.frame(message)
        self._flush(client)

    def _flush(self, client: Client) -> None:
        try:
            sent = client.connection.send(client.unsent)
            del client.unsent[:sent]
        except BlockingIOError:
            pass
        except OSError:
            self._leave(client)
            return
        if len(client.unsent) > MOST_UNSENT:
            logger.error("an API process does not read its answers: dropping it")
            self._leave(client)
        else:
            # A full pipe is waited for like any message, or an idle engine would never send the rest.
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
            if self._selector.get_key(client.connection).events != events:
                self._selector.modify(client.connection, events, client)

    def _leave(self, client: Client) -> None:
        if self.clients.pop(client.number, None):
            self._selector.unregister(client.connection)
            client.connection.close()
            self.core.abort_all(client.number)


def _refusal(request_id: str, error: SyringaError) -> protocol.Refused:
    overloaded = isinstance(error, EngineOverloaded)
    return protocol.Refused(request_id, error.message, error.param, overloaded, error.code)


def load(options: WorkerOptions) -> tuple[EngineCore, protocol.Ready]:
    """The engine, and what a worker says once it is there."""
    from syringa.engine.loading.loader import LoadOptions, load_model
    from syringa.engine.scheduling.limits import ATTENTION_SPAN, GPU_ATTENTION_SPAN, Limits
    from syringa.engine.worker.core import EngineCore
    from syringa.modelfiles import load_tokenizer, locate

    wanted = LoadOptions(
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        max_model_len=options.max_model_len,
        device=options.device,
        attention=options.attention,
        deterministic=options.deterministic,
    )
    with progress_bar("Reading weights") as advance:
        loaded = load_model(wanted, advance)
    limits = Limits(
        options.step_tokens or (GPU_STEP_TOKENS if loaded.gpu else CPU_STEP_TOKENS),
        options.max_running,
        options.max_queue,
        options.queue_timeout,
        GPU_ATTENTION_SPAN if loaded.gpu else ATTENTION_SPAN,
        options.gpu_memory_fraction,
    )
    with progress_bar("Recording CUDA graphs") as advance:
        core = EngineCore(
            loaded,
            limits,
            kv_cache_tokens=options.kv_cache_tokens,
            kv_cache_gb=options.kv_cache_gb,
            prefix_caching=options.prefix_caching,
            tokenizer_json=lambda: load_tokenizer(locate(options.model)).to_str(),
            progress=advance,
        )
    release_memory()
    info = msgspec.structs.replace(loaded.info, max_model_len=core.max_length)
    if loaded.device.type != "cuda":
        return core, protocol.Ready(info)
    from syringa.engine.gpu.device import held_memory

    return core, protocol.Ready(info, "cuda", held_memory(loaded.device))


def _exit_status(error: StartupError) -> int:
    return {NO_MEMORY: managed_process.NO_MEMORY, NO_GPU_MEMORY: managed_process.NO_GPU_MEMORY}.get(
        error.code or "", managed_process.CANNOT_START
    )


def main() -> None:
    options = managed_process.begin(WorkerOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every child; the supervisor decides what ends when
    logs.configure(options.log_level, options.log_format)
    guard_against_amx(options.dtype)
    # Threads that wait for the next loop by spinning would take the cores from the API process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # The first GPU is then the same one for CUDA as for the driver, which is asked how much memory it has.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    listener = protocol.listen(options.socket)
    try:
        core, ready = load(options)
    except StartupError as error:
        managed_process.give_up(error.message, _exit_status(error), options.reason_file)
    except (MemoryError, RuntimeError) as error:
        if not is_shortage(error):
            raise
        status = managed_process.NO_GPU_MEMORY if "CUDA" in str(error) else managed_process.NO_MEMORY
        managed_process.give_up(f"there is too little memory for {options.model}", status, options.reason_file)
    worker = Worker(core, ready, listener)

    def end(*_: object) -> None:
        worker.ending = True
        worker.wake()

    signal.signal(signal.SIGTERM, end)
    worker.run()


if __name__ == "__main__":
    main()
