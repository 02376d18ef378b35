"""The control protocol between API servers and the supervisor: acquire and release models, report their replicas.

A model is identified by a key that is derived from the options of its workers: two models with the same options share
their replicas.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import math
import selectors
import socket
import time
from typing import Generic, TypeVar

import msgspec

from syringa.config import Config, ModelSpec
from syringa.engine.client import protocol
from syringa.engine.interface import LoadStatus, ReplicaState
from syringa.engine.structured_output.probe_protocol import ProbeOptions
from syringa.engine.worker.options import WorkerOptions
from syringa.fleet.status import FleetStatus
from syringa.types import LoadProgress

M = TypeVar("M")

logger = logging.getLogger("syringa.supervisor")

READ_SIZE = 1 << 16
ACCEPT_PAUSE_SECONDS, ACCEPT_LOG_SECONDS = 0.05, 60.0  # while a connection cannot be accepted
_PASSING_ERRORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
MAX_UNSENT_BYTES = 16 << 20  # a report of 10,000 nodes is a tenth of it


class AcquireModel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for a replica with these options. The supervisor answers with a `WorkerState`, and reports every change."""

    options: WorkerOptions  # `socket` is chosen by the supervisor
    idle_timeout: float = 0.0  # seconds without use after which the worker is unloaded; 0: never
    restart: bool = False  # restart the worker whenever it exits
    opportunistic: bool = False  # no request waits: load only if nothing has to be evicted
    name: str = ""  # the model's id, for logs
    min_replicas: int = 1  # while the model is loaded
    max_replicas: int = 1
    pools: list[str] = []  # of a cluster, in which it may run, the preferred one first; none: any


class ReleaseModel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The model of this worker is no longer configured: unload it once it is idle."""

    key: str


class KeepModel(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Unload the model of this worker after other idle seconds than configured, until it is loaded again."""

    key: str
    idle_timeout: float  # see `AcquireModel`


class DrainReplica(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End a replica. Its requests finish within `grace` seconds or move to another one."""

    id: str
    grace: float = 0.0


class DrainNode(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Take a node out of use. The requests of its replicas finish within `grace` seconds or move to other nodes."""

    node: str
    grace: float | None = None  # None: that of its pool


class SetPool(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Open or close a pool, whatever its schedule says; None: let it follow its schedule again."""

    pool: str
    open: bool | None = None


class AcquireProbe(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Start the grammar probe with these options, unless it runs. Its socket is in the folder of the control socket."""

    options: ProbeOptions


class ClearSuspect(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A suspected request was answered."""

    key: str
    fingerprint: bytes


class WorkerState(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The state of a model and its replicas, sent to every API server on every change."""

    key: str
    status: LoadStatus
    reason: str = ""  # why it waits, hangs or failed
    hangs: int = 0  # see `WorkerCounts`
    crashes: int = 0
    replicas: list[ReplicaState] = []
    idle_timeout: float = 0.0  # see `AcquireModel`
    loading: LoadProgress | None = None  # while the status is "loading"
    loading_since: float = 0.0  # `time.monotonic`


class Suspects(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The suspected requests of a worker, sent on every change, and after a crash before the new `WorkerState`."""

    key: str
    levels: dict[bytes, int]  # by fingerprint, see `SuspectTable.levels`


SupervisorRequest = (
    AcquireModel | ReleaseModel | KeepModel | DrainReplica | DrainNode | SetPool | AcquireProbe | ClearSuspect
)
SupervisorReport = WorkerState | Suspects | FleetStatus


def acquire_request(spec: ModelSpec, config: Config) -> AcquireModel:
    """Return the request for a replica of a model, which is kept loaded if it is to be preloaded."""
    return AcquireModel(
        WorkerOptions.from_config(spec, config),
        spec.idle_seconds or 0.0,
        restart=bool(spec.preload),
        name=spec.id,
        min_replicas=spec.replicas.min,
        max_replicas=spec.replicas.max,
        pools=list(spec.pools),
    )


def merge_requests(first: AcquireModel, other: AcquireModel) -> AcquireModel:
    """Return what to ask for if two models share their workers: these stay as long as either model wants them."""
    timeouts = (first.idle_timeout, other.idle_timeout)
    return msgspec.structs.replace(
        first,
        idle_timeout=max(timeouts) if all(timeouts) else 0.0,
        restart=first.restart or other.restart,
        min_replicas=max(first.min_replicas, other.min_replicas),
        max_replicas=max(first.max_replicas, other.max_replicas),
        pools=list(dict.fromkeys((*first.pools, *other.pools))) if first.pools and other.pools else [],
    )


def worker_key(options: WorkerOptions) -> str:
    """Return the key of a model: a hash of the options of its workers without what differs between processes."""
    plain = msgspec.structs.replace(
        options, socket="", health_fd=-1, progress_bar=True, gpu="", listen="", tls=None, free_memory=0
    )
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=12).hexdigest()


def supervisor_decoder() -> protocol.FrameDecoder[SupervisorRequest]:
    return protocol.FrameDecoder(msgspec.msgpack.Decoder(SupervisorRequest))


def api_decoder() -> protocol.FrameDecoder[SupervisorReport]:
    return protocol.FrameDecoder(msgspec.msgpack.Decoder(SupervisorReport))


class Acceptor:
    """Accept the clients of a listening socket, also while the machine or this process is short of descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._logged_at = -math.inf

    def accept(self) -> socket.socket | None:
        """Return a connection; None if there is none, or none can be accepted now: the client waits."""
        try:
            return self._listener.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            if error.errno not in _PASSING_ERRORS:
                raise
            if (now := time.monotonic()) >= self._logged_at + ACCEPT_LOG_SECONDS:
                self._logged_at = now
                logger.error("supervisor cannot accept a connection: error=%r", error.strerror)
            time.sleep(ACCEPT_PAUSE_SECONDS)  # the socket stays readable: a selector would not wait
            return None


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
