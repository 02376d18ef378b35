"""What an API process and a model worker say to each other: msgpack messages behind their length, on a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Generic, Literal, TypeVar

import msgspec

from syringa.types import EngineDelta, EngineRequest, EngineStats, ModelInfo

HEADER = 4


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: EngineRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    request: str
    choice: int | None = None


class AskStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    pass


class Retire(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The supervisor wants the memory back: a worker ends if it has had nothing to do for `idle` seconds, and else
    answers `Stays`. With `drain` it ends as soon as it has nothing to do."""

    idle: float = 0.0
    drain: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message of a worker: its model can answer. `memory`: bytes that it takes on its device, if that is a
    GPU; what a process takes of the machine's can be looked up."""

    info: ModelInfo
    device: Literal["cpu", "cuda"] = "cpu"
    memory: int = 0


class Deltas(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one step added, to everything that this client has running."""

    deltas: list[EngineDelta]


class Refused(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that will not run."""

    request: str
    message: str
    param: str | None = None
    overloaded: bool = False
    code: str | None = None  # of the error, where it is the client's


class Stats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    stats: EngineStats


class Stays(msgspec.Struct, frozen=True, tag=True, array_like=True):
    stats: EngineStats


ToWorker = Submit | Abort | AskStats | Retire
FromWorker = Ready | Deltas | Refused | Stats | Stays
M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


class Frames(Generic[M]):
    """Cuts a byte stream back into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[M]:
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= HEADER:
            end = at + HEADER + int.from_bytes(buffer[at : at + HEADER], "little")
            if len(buffer) < end:
                break
            yield self._decoder.decode(bytes(buffer[at + HEADER : end]))
            at = end
        del buffer[:at]


def listen(path: str) -> socket.socket:
    """A socket at `path`, for this user alone. Nobody is waited for there."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def worker_frames() -> Frames[ToWorker]:
    """For what a worker receives."""
    return Frames(msgspec.msgpack.Decoder(ToWorker))


def client_frames() -> Frames[FromWorker]:
    """For what an API process receives."""
    return Frames(msgspec.msgpack.Decoder(FromWorker))
