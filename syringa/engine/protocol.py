"""What an API process and a model worker say to each other: msgpack messages behind their length, on a Unix socket."""

from __future__ import annotations

from collections.abc import Iterator

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


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The first message of a worker: its model can answer."""

    info: ModelInfo


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


ToWorker = Submit | Abort | AskStats
FromWorker = Ready | Deltas | Refused | Stats

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToWorker | FromWorker) -> bytes:
    body = _encoder.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


class Frames:
    """Cuts a byte stream back into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[ToWorker] | msgspec.msgpack.Decoder[FromWorker]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[ToWorker | FromWorker]:
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


def worker_frames() -> Frames:
    """For what a worker receives."""
    return Frames(msgspec.msgpack.Decoder(ToWorker))


def client_frames() -> Frames:
    """For what an API process receives."""
    return Frames(msgspec.msgpack.Decoder(FromWorker))
