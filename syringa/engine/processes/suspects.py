"""Requests that were running when a worker crashed or hung, known by a fingerprint of their content.

A request that is computed at two crashes, and alone at the second, is their cause: it is refused. Requests that were
computed together with others are only suspected: each is computed alone when it comes again, and is cleared when it is
answered.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from syringa.engine.processes.health import FINGERPRINT_BYTES
from syringa.types import EmbeddingRequest, EngineRequest

MAX_SUSPECTS = 1024
KEEP_SECONDS = 600.0  # after the last crash

REFUSED = 255
"""The level of a request that is refused. Lower levels are numbers of crashes."""

_encoder = msgspec.msgpack.Encoder(order="deterministic")


def fingerprint(request: EngineRequest) -> bytes:
    """Return a hash of a request's tenant and content, the same whenever a client sends it.

    Seed and priority, which a client may change from one attempt to the next, are not part of it.
    """
    sampling = msgspec.structs.replace(request.sampling, seed=0, logit_bias={})
    content = msgspec.structs.replace(
        request, id="", sampling=sampling, images=(), priority=0, fingerprint=b"", isolation="none", resumed=()
    )
    bias = sorted(request.sampling.logit_bias.items())
    images = [(image.digest, image.detail) for image in request.images]
    return hashlib.blake2b(_encoder.encode((content, bias, images)), digest_size=FINGERPRINT_BYTES).digest()


def embedding_fingerprint(request: EmbeddingRequest) -> bytes:
    """Return the same for a request for embeddings."""
    content = msgspec.structs.replace(request, id="", priority=0, fingerprint=b"", isolated=False)
    return hashlib.blake2b(_encoder.encode(content), digest_size=FINGERPRINT_BYTES).digest()


@dataclass
class _Suspect:
    crashes: int
    refused: bool
    until: float


class SuspectTable:
    """The supervisor's memory of suspected requests. It holds hashes, no content."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()  # the last seen last

    def record_crash(self, running: Iterable[bytes]) -> None:
        """Record the requests that were computed when a worker crashed or hung."""
        present = set(running)
        for fingerprint in present:
            known = self._suspects.pop(fingerprint, None)
            crashes = known.crashes + 1 if known else 1
            refused = (known is not None and known.refused) or (crashes >= 2 and len(present) == 1)
            self._suspects[fingerprint] = _Suspect(crashes, refused, self._clock() + KEEP_SECONDS)
        while len(self._suspects) > MAX_SUSPECTS:
            self._suspects.popitem(last=False)

    def clear(self, fingerprint: bytes) -> bool:
        """Forget a request that was answered. Return whether it was suspected."""
        known = self._suspects.get(fingerprint)
        if known is None or known.refused:
            return False
        del self._suspects[fingerprint]
        return True

    def expire(self) -> bool:
        """Forget old entries. Return whether there were any."""
        before = len(self._suspects)
        while self._suspects and next(iter(self._suspects.values())).until <= self._clock():
            self._suspects.popitem(last=False)
        return len(self._suspects) < before

    def levels(self) -> dict[bytes, int]:
        """Return the number of crashes of each suspect, or `REFUSED`."""
        return {
            fingerprint: REFUSED if each.refused else min(each.crashes, REFUSED - 1)
            for fingerprint, each in self._suspects.items()
        }
