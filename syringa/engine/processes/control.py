"""What API processes and the supervisor say to each other of model workers: which are wanted, and how they are.

A worker is known by a key that is made of its options: two models with the same options share one.
"""

from __future__ import annotations

import contextlib
import hashlib
import selectors
import socket
from typing import Generic, TypeVar

import msgspec

from syringa.engine.client import protocol
from syringa.engine.interface import Status
from syringa.engine.worker.server import WorkerOptions

M = TypeVar("M")

READ_SIZE = 1 << 16
MOST_UNSENT = 1 << 20


class Want(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Somebody wants this worker. The answer is its `State`, and so is all that becomes of it."""

    options: WorkerOptions  # without a socket: that is the supervisor's to choose
    idle: float = 0.0  # seconds without use after which it may go; 0: never
    keep: bool = False  # start it again whenever it dies
    soft: bool = False  # nobody waits yet: start it only if no other has to leave for it
    name: str = ""  # the model's id, for people


class Drop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This worker's model is no longer configured: it goes when it has nothing to do."""

    key: str


class State(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """How a worker is; every API process is told of every change."""

    key: str
    status: Status
    socket: str = ""  # where a loaded one listens; for a cold one, that the worker there is leaving
    reason: str = ""  # why it waits or has failed


ToSupervisor = Want | Drop


def key_of(options: WorkerOptions) -> str:
    plain = msgspec.structs.replace(options, socket="")
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=12).hexdigest()


def supervisor_frames() -> protocol.Frames[ToSupervisor]:
    return protocol.Frames(msgspec.msgpack.Decoder(ToSupervisor))


def api_frames() -> protocol.Frames[State]:
    return protocol.Frames(msgspec.msgpack.Decoder(State))


class Link(Generic[M]):
    """The supervisor's end of a connection. It never waits: who does not read its messages loses the connection."""

    def __init__(self, connection: socket.socket, frames: protocol.Frames[M], selector: selectors.BaseSelector) -> None:
        connection.setblocking(False)
        self.open = True
        self._connection, self._frames, self._selector = connection, frames, selector
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
        if len(self._unsent) > MOST_UNSENT:
            self.close()

    def receive(self) -> list[M]:
        """What has come since. `open` is false once there will be no more."""
        messages: list[M] = []
        while self.open:
            try:
                data = self._connection.recv(READ_SIZE)
                messages += self._frames.feed(data)
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
