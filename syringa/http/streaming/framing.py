"""How the parts of a stream look on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from syringa.http.middleware.errors import envelope

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Framing:
    """`frame` writes one chunk. `done` ends a good stream; what went wrong in the middle, `fail` writes instead."""

    frame: Callable[[Any], bytes]
    fail: Callable[[Exception], bytes]
    done: bytes = b""


DONE = b"data: [DONE]\n\n"


def data(chunk: Any) -> bytes:
    return b"data: %b\n\n" % (chunk if type(chunk) is msgspec.Raw else encode(chunk))


def named(event: Any) -> bytes:
    """An event of the Responses API, under its own name."""
    name: str = event.type
    return b"event: " + name.encode() + b"\ndata: " + encode(event) + b"\n\n"


PLAIN = Framing(data, lambda error: data(envelope(error)), DONE)
