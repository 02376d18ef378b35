"""The messages between API servers and the grammar probe of a model. Must not import torch."""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from syringa.engine.client import protocol
from syringa.types import Grammar


class ProbeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a grammar probe, which the supervisor sends it at the start."""

    model: str
    cpu_seconds: float
    memory_bytes: int
    socket: str = ""  # chosen by the supervisor


class CheckGrammar(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Compile a grammar and answer with a `Verdict`. `cache_key` is that of `EngineRequest`."""

    id: int
    grammar: Grammar
    tenant: str = ""
    cache_key: bytes = b""
    background: bool = False  # for a request that runs only when no other does


class CancelCheck(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The verdict is no longer needed."""

    id: int


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Whether a grammar may be used. `memory` is what it takes when it is compiled, in bytes.

    `exceeded`: a limit of the probe ended the compilation. `overloaded`: too many grammars of the tenant wait, or
    this machine is too busy for a check in the background.
    """

    id: int
    outcome: Literal["valid", "invalid", "exceeded", "overloaded"]
    message: str = ""
    memory: int = 0


def probe_key(options: ProbeOptions) -> str:
    """Return the key of a probe: a hash of its options without the socket."""
    plain = msgspec.structs.replace(options, socket="")
    return hashlib.blake2b(msgspec.json.encode(plain), digest_size=6).hexdigest()


def probe_decoder() -> protocol.FrameDecoder[CheckGrammar | CancelCheck]:
    return protocol.FrameDecoder(msgspec.msgpack.Decoder(CheckGrammar | CancelCheck))


def verdict_decoder() -> protocol.FrameDecoder[Verdict]:
    return protocol.FrameDecoder(msgspec.msgpack.Decoder(Verdict))
