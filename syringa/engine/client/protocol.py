"""What an API process and a model worker say to each other: msgpack messages behind their length, on a Unix socket."""

from __future__ import annotations

import contextlib
import os
import socket
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import msgspec

from syringa.types import EngineDelta, EngineRequest, EngineStats, ModelInfo

HEADER = 4


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """`request.id` is a number, less than `MOST_NUMBERS`, which is all that a request is called between the two."""

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
    """What one step added, to everything that this client has running, but for `Tokens`."""

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

Tokens: TypeAlias = "array[int]"
"""Deltas that are nothing but an `only_token`: the numbers of their requests and the tokens, by turns. Most steps make
nothing else, and between two steps whatever reads a longer message falls out of the processor's caches. They come
behind a length with the highest bit set."""

_TOKENS = 1 << 31
MOST_NUMBERS = 1 << 32

M = TypeVar("M")

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    body = _encoder.encode(message)
    if len(body) >= _TOKENS:
        raise ValueError(f"a message of {len(body)} bytes is too long")
    return len(body).to_bytes(HEADER, "little") + body


def frame_step(deltas: Iterable[EngineDelta]) -> bytes:
    """What one step added, for a client that numbers its requests: `Tokens`, then `Deltas` with the rest."""
    tokens: dict[str, int] = {}
    others: list[EngineDelta] = []
    behind: set[str] = set()  # the requests whose order would be lost
    for delta in deltas:
        token = delta.only_token
        if token is None or delta.request in tokens or delta.request in behind:
            others.append(delta)
            behind.add(delta.request)
        else:
            tokens[delta.request] = token
    framed = frame(Deltas(others)) if others else b""
    if tokens:
        body = array("I", [each for id, token in tokens.items() for each in (int(id), token)]).tobytes()
        framed = (len(body) | _TOKENS).to_bytes(HEADER, "little") + body + framed
    return framed


class Frames(Generic[M]):
    """Cuts a byte stream back into messages."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decode: Callable[[bytes | bytearray], M] = decoder.decode
        self._buffer = bytearray()  # the beginning of a message

    def _tokens(self, body: bytes | bytearray) -> M:
        raise msgspec.DecodeError("tokens come from workers only")

    def feed(self, data: bytes) -> Iterator[M]:
        buffer = self._buffer
        whole: bytes | bytearray = data
        if buffer:
            buffer += data
            whole = buffer
        at, size = 0, len(whole)
        while size - at >= HEADER:
            length = int.from_bytes(whole[at : at + HEADER], "little")
            end = at + HEADER + (length & ~_TOKENS)
            if size < end:
                break
            body = whole[at + HEADER : end]
            yield self._tokens(body) if length & _TOKENS else self._decode(body)
            at = end
        if whole is buffer:
            del buffer[:at]
        elif at < size:
            buffer += data[at:]


class _ClientFrames(Frames["FromWorker | Tokens"]):
    def _tokens(self, body: bytes | bytearray) -> Tokens:
        try:
            return array("I", bytes(body))
        except ValueError as error:
            raise msgspec.DecodeError(f"tokens: {error}") from None


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


def client_frames() -> Frames[FromWorker | Tokens]:
    """For what an API process receives."""
    return _ClientFrames(msgspec.msgpack.Decoder(FromWorker))
