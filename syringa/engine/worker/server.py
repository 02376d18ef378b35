"""The process of a model worker: `python -m syringa.engine.worker.server`, started by the supervisor.

One thread receives, steps and sends in turn. Other threads compile grammars and preprocess images, and one accepts
clients and writes heartbeats (`connections.py`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import signal
import socket
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from syringa import logs
from syringa.engine.client import protocol
from syringa.engine.client.transport import Listener, Stream, listen
from syringa.engine.cpu.features import NO_MEMORY, disable_broken_amx
from syringa.engine.processes import managed_process
from syringa.engine.processes.health import HealthPage, start_heartbeat
from syringa.engine.scheduling.oom import NO_GPU_MEMORY, is_oom
from syringa.engine.worker.connections import ClientConnection, ConnectionThread
from syringa.engine.worker.engine import InterruptibleEngine, WorkerEngine
from syringa.engine.worker.options import WorkerOptions
from syringa.engine.worker.startup import load_engine
from syringa.errors import EngineOverdue, EngineOverloaded, StartupError, SyringaError
from syringa.types import EngineDelta

logger = logging.getLogger("syringa.worker")

READ_SIZE = 1 << 20
MAX_UNSENT_BYTES = 64 << 20  # of a client that does not read


class WorkerServer:
    """Serve one engine to any number of API processes."""

    def __init__(
        self,
        core: WorkerEngine,
        ready: protocol.Ready,
        listeners: Sequence[Listener],
        health: HealthPage | None = None,
        *,
        heartbeat_seconds: float = protocol.HEARTBEAT_SECONDS,
    ) -> None:
        """`ready` gets the address of the first TCP listener. `health`: what the supervisor sees of the step loop."""
        self.core = core
        self.health = health or HealthPage()
        remote = [str(each.address) for each in listeners if each.address.kind == "tcp"]
        self.ready = msgspec.structs.replace(ready, address=remote[0] if remote else "")
        self.clients: dict[int, ClientConnection] = {}
        self.stopping = False
        self._draining = False
        self._last_client_id = 0
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._accepted: deque[Stream] = deque()  # filled by the connection thread
        self._connections = ConnectionThread(listeners, self._hand_over, self._beat, interval=heartbeat_seconds)
        core.attach(self.wake, self.health.set_running)
        if isinstance(core, InterruptibleEngine):
            core.interrupt_when(self.has_urgent_request)

    def wake(self) -> None:
        """Interrupt a wait for messages. Callable from any thread and from a signal handler."""
        with contextlib.suppress(OSError):  # a wake-up is pending already, or the server has ended
            self._wake_writer.send(b"!")

    def run(self) -> None:
        self.health.set_phase("serving")
        self._connections.start()
        try:
            while not self.stopping:
                self.receive()
                self.send(self.core.step())
                self.send_embedded()
                self.send_refusals()
                if self._draining and self._idle_seconds() is not None:
                    self.stopping = True
        finally:
            self._close()

    def has_urgent_request(self) -> bool:
        """Return whether a request has arrived that is not a background request. Called in the middle of a step.

        Messages are received for that, and are handled after the step, as is the end of a connection.
        """
        for key, events in self._selector.select(0):
            if key.fileobj is self._wake_reader or not events & selectors.EVENT_READ:
                continue
            client: ClientConnection = key.data
            try:
                client.inbox += client.decoder.feed(client.receive(READ_SIZE))
            except OSError:
                pass
            except msgspec.MsgspecError as error:
                client.inbox.append(error)
        messages = (message for client in self.clients.values() for message in client.inbox)
        return any(isinstance(each, protocol.Submit) and not each.request.background for each in messages)

    def receive(self) -> None:
        """Handle the messages that have arrived. Wait for one if there is nothing to compute."""
        for client in [each for each in self.clients.values() if each.inbox]:
            received, client.inbox = client.inbox, []
            self._handle_all(client, received)
        delay = self.core.next_step_delay
        self._begin_wait(delay)
        events = self._selector.select(delay)
        self._end_wait()
        for key, _ in events:
            if key.fileobj is self._wake_reader:
                self._wake_reader.recv(4096)
                while self._accepted:
                    self._admit(self._accepted.popleft())
            else:
                self._read(key.data)

    def _begin_wait(self, delay: float | None) -> None:
        """Report that no step runs."""
        if delay != 0.0:
            self.health.set_running(self.core.preparing)
        self.health.end_step()

    def _end_wait(self) -> None:
        self.health.begin_step()

    def send(self, deltas: list[tuple[int, EngineDelta]]) -> None:
        """Send the deltas of a step, one message per client."""
        by_client: dict[int, list[EngineDelta]] = {}
        for client_id, delta in deltas:
            by_client.setdefault(client_id, []).append(delta)
        for client_id, own in by_client.items():
            if client := self.clients.get(client_id):
                self._send(client, protocol.frame(protocol.Deltas(own)))
        for client in [client for client in self.clients.values() if client.unsent]:
            self._send(client)

    def send_embedded(self) -> None:
        for client_id, result in self.core.take_embedded():
            if client := self.clients.get(client_id):
                self._write(client, protocol.Embedded(result))

    def send_refusals(self) -> None:
        """Report accepted requests that will not run, because their images are invalid or they waited too long."""
        for client_id, request_id, error in self.core.take_refused():
            if client := self.clients.get(client_id):
                self._write(client, _rejection(request_id, error))

    def _hand_over(self, stream: Stream) -> None:
        """Pass a connection to the step loop. Called by the connection thread."""
        self._accepted.append(stream)
        self.wake()

    def _beat(self) -> None:
        """Send a heartbeat to every client. Called by the connection thread."""
        for client in list(self.clients.values()):
            if client.beat():
                self.wake()

    def _admit(self, stream: Stream) -> None:
        self._last_client_id += 1
        client = ClientConnection(self._last_client_id, stream)
        client.unsent += protocol.frame(self.ready)  # before any heartbeat
        self.clients[client.client_id] = client
        self._selector.register(stream, selectors.EVENT_READ, client)
        self._send(client)

    def _read(self, client: ClientConnection) -> None:
        try:
            data = client.receive(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect(client)
            return
        self._handle_all(client, client.decoder.feed(data))

    def _handle_all(
        self, client: ClientConnection, messages: Iterable[protocol.ToWorker | msgspec.MsgspecError]
    ) -> None:
        try:
            self._handle(client, messages)
        except msgspec.MsgspecError as error:
            logger.error("worker: client disconnected, its message is malformed: reason=%r", str(error))
            self._disconnect(client)

    def _handle(self, client: ClientConnection, messages: Iterable[protocol.ToWorker | msgspec.MsgspecError]) -> None:
        """Handle messages. Raises `msgspec.MsgspecError` for malformed ones."""
        for message in messages:
            if client.client_id not in self.clients:  # an answer could not be sent
                return
            match message:
                case msgspec.MsgspecError():
                    raise message
                case protocol.Submit(request):
                    try:
                        self.core.submit(request, client.client_id)
                    except SyringaError as error:
                        self._write(client, _rejection(request.id, error))
                case protocol.Embed(embedding):
                    try:
                        self.core.embed(embedding, client.client_id)
                    except SyringaError as error:
                        self._write(client, _rejection(embedding.id, error))
                case protocol.Abort(request_id, choice):
                    self.core.abort(request_id, choice, client.client_id)
                case protocol.GetStats():
                    self._write(client, protocol.StatsReply(self.core.stats()))
                case protocol.Retire(idle, drain):
                    self._retire(client, idle, drain)

    def _retire(self, client: ClientConnection, idle: float, drain: bool) -> None:
        """Exit if the worker is idle. The supervisor's view may be outdated, so it is checked here again."""
        idle_seconds = self._idle_seconds()
        if drain or (idle_seconds is not None and idle_seconds >= idle):
            self._draining = True
        else:
            self._write(client, protocol.RetireDeclined(self.core.stats()))

    def _idle_seconds(self) -> float | None:
        """Return the time since there was something to compute or send; None while there is."""
        stats = self.core.stats()
        busy = stats.running or stats.waiting or any(client.unsent for client in self.clients.values())
        return None if busy else stats.idle_seconds

    def _write(self, client: ClientConnection, message: protocol.FromWorker) -> None:
        self._send(client, protocol.frame(message))

    def _send(self, client: ClientConnection, data: bytes = b"") -> None:
        """Send what is unsent and `data`, as far as the client reads it."""
        try:
            client.send(data)
        except OSError:
            self._disconnect(client)
            return
        if len(client.unsent) > MAX_UNSENT_BYTES:
            logger.error("worker: client disconnected, it does not read: unsent_bytes=%d", len(client.unsent))
            self._disconnect(client)
        else:
            # The selector waits for a full pipe like for a message, or an idle engine would never send the rest.
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.unsent else 0)
            if self._selector.get_key(client.stream).events != events:
                self._selector.modify(client.stream, events, client)

    def _disconnect(self, client: ClientConnection) -> None:
        if self.clients.pop(client.client_id, None):
            self._selector.unregister(client.stream)
            client.close()
            self.core.abort_all(client.client_id)

    def _close(self) -> None:
        self._connections.stop()
        self._selector.close()
        for client in self.clients.values():
            client.close()
        for stream in self._accepted:
            stream.close()
        self._wake_reader.close()
        self._wake_writer.close()


def _rejection(request_id: str, error: SyringaError) -> protocol.RequestRejected:
    overloaded = isinstance(error, EngineOverloaded)
    overdue = error.waited if isinstance(error, EngineOverdue) else None
    return protocol.RequestRejected(request_id, error.message, error.param, overloaded, error.code, overdue)


def exit_status(error: StartupError) -> int:
    return {NO_MEMORY: managed_process.EXIT_NO_MEMORY, NO_GPU_MEMORY: managed_process.EXIT_NO_GPU_MEMORY}.get(
        error.code or "", managed_process.EXIT_CANNOT_START
    )


def open_listeners(options: WorkerOptions) -> list[Listener]:
    """Listen for the supervisor, and for clients of other machines where `options` say so. Raises `ConfigError`."""
    listeners = [listen(f"unix:{options.socket}")]
    if options.listen:
        listeners.append(listen(options.listen, options.tls))
    return listeners


def report_health(options: WorkerOptions) -> HealthPage:
    """Begin to report the health of this process to the supervisor."""
    health = HealthPage(options.health_fd)
    health.begin_step()
    start_heartbeat(health)
    return health


def main() -> None:
    options = managed_process.attach_to_parent(WorkerOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the supervisor stops them in order
    logs.configure(options.log_level, options.log_format)
    disable_broken_amx(options.dtype)
    # OpenMP threads that spin between loops would take the cores from the API process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Number GPUs as the driver does, which reports their free memory to the supervisor.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    health = report_health(options)
    try:
        listeners = open_listeners(options)
        core, ready = load_engine(options, health.report_loading)
    except StartupError as error:
        managed_process.exit_with_reason(error.message, exit_status(error), options.reason_file)
    except (MemoryError, RuntimeError) as error:
        if not is_oom(error):
            raise
        status = managed_process.EXIT_NO_GPU_MEMORY if "CUDA" in str(error) else managed_process.EXIT_NO_MEMORY
        managed_process.exit_with_reason(f"there is too little memory for {options.model}", status, options.reason_file)
    server = WorkerServer(core, ready, listeners, health)

    def stop(*_: object) -> None:
        server.stopping = True
        server.wake()

    signal.signal(signal.SIGTERM, stop)
    server.run()


if __name__ == "__main__":
    main()
