"""The control protocol between API servers and the supervisor: acquire and release models, report worker states.

A worker is identified by a key that is derived from its options: two models with the same options share a worker.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
from typing import Generic, TypeVar

import msgspec

from syringa.engine.client import protocol
from syringa.engine.interface import LoadStatus
from syringa.engine.structured_output.probe_protocol import ProbeOptions
from syringa.engine.worker.options import WorkerOptions

M = TypeVar("M")

READ_SIZE = 1 << 16
MAX_UNSENT_BYTES = 1 << 20


class AcquireModel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for a worker with these options. The supervisor answers with its `WorkerState`, and reports every change."""

    options: WorkerOptions  # `socket` is chosen by the supervisor
    idle_timeout: float = 0.0  # seconds without use after which the worker is unloaded; 0: never
    restart: bool = False  # restart the worker whenever it exits
    opportunistic: bool = False  # no request waits: load only if nothing has to be evicted
    name: str = ""  # the model's id, for logs


class ReleaseModel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model of this worker is no longer configured: unload it once it is idle."""

    key: str


class AcquireProbe(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start the grammar probe with these options, unless it runs. Its socket is in the folder of the control socket."""

    options: ProbeOptions


class ClearSuspect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A suspected request was answered."""

    key: str
    fingerprint: bytes


class WorkerState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The state of a worker, sent to every API server on every change."""

    key: str
    status: LoadStatus
    socket: str = ""  # of a loaded or hanging worker; in status "cold", of a worker that is being unloaded
    reason: str = ""  # why it waits, hangs or failed
    hangs: int = 0  # see `WorkerCounts`
    crashes: int = 0


class Suspects(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The suspected requests of a worker, sent on every change, and after a crash before the new `WorkerState`."""

    key: str
    levels: dict[bytes, int]  # by fingerprint, see `SuspectTable.levels`


SupervisorRequest = AcquireModel | ReleaseModel | AcquireProbe | ClearSuspect
SupervisorReport = WorkerState | Suspects


def worker_key(options: WorkerOptions) -> str:
    """Return the key of a worker: a hash of its options without what differs between processes."""
    plain = msgspec.structs.replace(options, socket="", health_fd=-1)
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=12).hexdigest()


def supervisor_decoder() -> protocol.FrameDecoder[SupervisorRequest]:
    return protocol.FrameDecoder(msgspec.msgpack.Decoder(SupervisorRequest))


def api_decoder() -> protocol.FrameDecoder[SupervisorReport]:
    return protocol.FrameDecoder(msgspec.msgpack.Decoder(SupervisorReport))


class MessageConnection(Generic[M]):
    """The supervisor's end of a socket. It never blocks: a peer that does not read its messages is disconnected."""

    def __init__(
        self, connection: socket.socket, decoder: protocol.FrameDecoder[M], selector: selectors.BaseSelector
    ) -> None:
        connection.setblocking(False)
        self.open = True
        self._connection, self._decoder, self._selector = connection, decoder, selector
        self._unsent = bytearray()
        selector.register(connection, selectors.EVENT_READ)

    def send(self, message: msgspec.Struct) -> None:
        if self.open:
            self._unsent += protocol.frame(message)
            self.flush()

    def flush(self) -> None:
        if not (self.open and self._unsent):
            return
        try:
            del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        if len(self._unsent) > MAX_UNSENT_BYTES:
            self.close()

    def receive(self) -> list[M]:
        """Return the messages that have arrived. `open` is False once there will be no more."""
        messages: list[M] = []
        while self.open:
            try:
                data = self._connection.recv(READ_SIZE)
                messages += self._decoder.feed(data)
            except BlockingIOError:
                break
            except (OSError, msgspec.MsgspecError):
                data = b""
            if not data:
                self.close()
        return messages

    def close(self) -> None:
        if self.open:
            self.open = False
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(self._connection)
            self._connection.close()
