"""The wire protocol between API processes and model workers: length-prefixed msgpack messages on a byte stream."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

import msgspec

from syringa.types import EmbeddingRequest, EmbeddingResult, EngineDelta, EngineRequest, EngineStats, ModelInfo

HEADER_BYTES = 4
MAX_MESSAGE_BYTES = (1 << 32) - 1
HEARTBEAT_SECONDS = 0.5  # interval of a worker's heartbeats


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Run a request. `request.id` is unique among the requests of this connection."""

    request: EngineRequest


class Embed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Embed texts or score pairs. `request.id` is unique as in `Submit`."""

    request: EmbeddingRequest


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop one choice of a request, or all of them."""

    request_id: str
    choice: int | None = None


class GetStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask for a `StatsReply`."""


class Retire(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Ask the worker to exit, to free its memory.

    A worker that has been idle for `idle` seconds exits; otherwise it answers `RetireDeclined`. With `drain` it
    accepts no more clients and exits as soon as nothing runs.
    """

    idle: float = 0.0
    drain: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message of a worker: the model is loaded. `memory` is what it takes on its GPU, in bytes.

    Workers with the same `fingerprint` give the same outputs, bit by bit. `address` is where clients of other machines
    connect, if the worker listens for them.
    """

    info: ModelInfo
    device: Literal["cpu", "cuda"] = "cpu"
    memory: int = 0
    fingerprint: str = ""
    address: str = ""


class Deltas(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What one step added to the requests of this connection."""

    deltas: list[EngineDelta]


class Embedded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The answer to `Embed`."""

    result: EmbeddingResult


class RequestRejected(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A request that will not run. `code` is the error code where the client is at fault."""

    request_id: str
    message: str
    param: str | None = None
    overloaded: bool = False
    code: str | None = None
    overdue: float | None = None  # the seconds that it has waited, if it waited for too long


class StatsReply(msgspec.Struct, frozen=True, tag=True, array_like=True):
    stats: EngineStats


class RetireDeclined(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The worker is in use and stays."""

    stats: EngineStats


class Heartbeat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sent every `HEARTBEAT_SECONDS`, also during a step however long it takes: the process is alive."""


ToWorker = Submit | Embed | Abort | GetStats | Retire
FromWorker = Ready | Deltas | Embedded | RequestRejected | StatsReply | RetireDeclined | Heartbeat

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length in front."""
    body = _encoder.encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(body)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return len(body).to_bytes(HEADER_BYTES, "little") + body


class FrameDecoder(Generic[M]):
    """Split a byte stream into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decode: Callable[[bytes | bytearray], M] = decoder.decode
        self._buffer = bytearray()  # an incomplete message

    def feed(self, data: bytes) -> Iterator[M]:
        """Yield the messages that `data` completes. Raises `msgspec.DecodeError` for malformed ones."""
        buffer = self._buffer
        available: bytes | bytearray = data
        if buffer:
            buffer += data
            available = buffer
        at, size = 0, len(available)
        while size - at >= HEADER_BYTES:
            end = at + HEADER_BYTES + int.from_bytes(available[at : at + HEADER_BYTES], "little")
            if size < end:
                break
            yield self._decode(available[at + HEADER_BYTES : end])
            at = end
        if available is buffer:
            del buffer[:at]
        elif at < size:
            buffer += data[at:]


def listen(path: str) -> socket.socket:
    """Return a non-blocking listening socket at `path`, accessible to this user only."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    listener.setblocking(False)
    return listener


def worker_decoder() -> FrameDecoder[ToWorker]:
    """Return a decoder for what a worker receives."""
    return FrameDecoder(msgspec.msgpack.Decoder(ToWorker))


def client_decoder() -> FrameDecoder[FromWorker]:
    """Return a decoder for what a client of a worker receives."""
    return FrameDecoder(msgspec.msgpack.Decoder(FromWorker))
