"""Which models stay in memory: who has to leave, and when there is room for another. Knows no process and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

# Weights take more in memory than in their file, and a process takes something itself.
GROWTH, OVERHEAD = 1.3, 512 << 20
MARGIN = 256 << 20  # free memory goes up and down by itself: less than this is no reason to try again


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that is in memory, or on its way into it or out of it."""

    key: str
    used_at: float
    busy: bool = False
    state: Literal["loading", "settled", "leaving"] = "settled"
    memory: int = 0  # bytes that it takes when it is loaded
    held: int = 0  # bytes that it takes now
    idle_limit: float = 0.0  # seconds without use after which it leaves; 0: never
    dropped: bool = False  # it is no longer configured


@dataclass(frozen=True, kw_only=True)
class Newcomer:
    """A model to be loaded."""

    estimate: int  # bytes, going by its files
    too_little: int = 0  # bytes that were free when it was tried and did not fit
    hopeless: int = 0  # the same, when nobody else was there


@dataclass(frozen=True)
class Verdict:
    action: Literal["start", "evict", "wait", "never"]
    key: str = ""  # whom to evict
    reason: str = ""


def estimate(weights: int) -> int:
    """Bytes that a model needs whose weights have this many on disk."""
    return int(weights * GROWTH) + OVERHEAD


def due(loaded: Sequence[Loaded], now: float) -> list[str]:
    """Those that nobody has used for too long, or that are no longer wanted at all."""
    return [
        each.key
        for each in loaded
        if each.state == "settled" and not each.busy and (each.dropped or 0 < each.idle_limit <= now - each.used_at)
    ]


def room(new: Newcomer, loaded: Sequence[Loaded], *, free: int, most: int, impatient: bool = False) -> Verdict:
    """What has to happen before a model can be loaded. `free`: bytes; `most`: models at a time, 0 for any number.

    The least recently used of those that have nothing to do leaves first. If all have, the newcomer waits; when it has
    waited long enough to be `impatient`, one of them is to leave as soon as it is done with what it has.
    """
    spare = free - sum(max(0, each.memory - each.held) for each in loaded if each.state == "loading")
    reachable = spare + sum(each.held for each in loaded)
    if new.hopeless and reachable < new.hopeless + MARGIN:
        return Verdict("never", reason="there is too little memory for it")
    full = 0 < most <= len(loaded)
    if new.too_little:
        short = spare < new.too_little + MARGIN
    else:
        # If nobody's leaving would be enough by this rough measure, let it try: it knows exactly.
        short = spare < new.estimate <= reachable
    if not full and not (short and loaded):
        return Verdict("start")
    reason = f"{len(loaded)} models are loaded, as many as may be" if full else "memory is short"
    if any(each.state == "leaving" for each in loaded):
        return Verdict("wait", reason=reason)
    movable = [each for each in loaded if each.state == "settled" and (impatient or not each.busy)]
    if not movable:
        return Verdict("wait", reason=f"{reason}, and all of them are in use")
    return Verdict("evict", min(movable, key=lambda each: (each.busy, each.used_at)).key, reason)
