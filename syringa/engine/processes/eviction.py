"""Which models stay in memory: who has to leave, and when there is room for another. Knows no process and no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Device = Literal["cpu", "cuda"]
"""Whose memory a model takes: the machine's or the GPU's."""

BYTES = {"int8": 1, "fp8": 1, "bf16": 2, "fp32": 4}  # of a weight
USUAL: dict[Device, str] = {"cpu": "int8", "cuda": "bf16"}
# Some weights are held in more bits than the rest, and a process takes something itself.
GROWTH, OVERHEAD = 1.3, 512 << 20
GPU_GROWTH, GPU_OVERHEAD = 1.05, 3 << 30  # a CUDA context, recorded steps, and what the largest step computes with
MARGIN = 256 << 20  # free memory goes up and down by itself: less than this is no reason to try again


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model that is in memory, or on its way into it or out of it."""

    key: str
    device: Device = "cpu"
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

    device: Device = "cpu"
    estimate: int  # bytes, going by its files
    too_little: int = 0  # bytes that were free when it was tried and did not fit
    hopeless: int = 0  # the same, when nobody else was there


@dataclass(frozen=True)
class Verdict:
    action: Literal["start", "evict", "wait", "never"]
    key: str = ""  # whom to evict
    reason: str = ""


def estimate(weights: int, dtype: str, device: Device, *, least: int = 1) -> int:
    """Bytes that a model of so many weights needs; on a GPU, beside its cache. `least`: for each weight."""
    size = max(BYTES[USUAL[device] if dtype == "auto" else dtype], least)
    growth, overhead = (GROWTH, OVERHEAD) if device == "cpu" else (GPU_GROWTH, GPU_OVERHEAD)
    return int(weights * size * growth) + overhead


def share(own: int, others: Sequence[int], *, total: int, most: int) -> float:
    """Which part of a GPU's `total` bytes a model may take, so that the others that may be there with it fit too: what
    it needs, and an equal part of the rest. 1: all of it, because it is alone or because they do not fit together.

    A cache takes whatever it is given, so without this the first model would leave nothing. `most`: models at a time.
    """
    beside = sorted(others, reverse=True)[: most - 1 if most else None]
    rest = total - own - sum(beside)
    if not beside or rest <= 0:
        return 1.0
    return (own + rest / (1 + len(beside))) / total


def due(loaded: Sequence[Loaded], now: float) -> list[str]:
    """Those that nobody has used for too long, or that are no longer wanted at all."""
    return [
        each.key
        for each in loaded
        if each.state == "settled" and not each.busy and (each.dropped or 0 < each.idle_limit <= now - each.used_at)
    ]


def room(new: Newcomer, loaded: Sequence[Loaded], *, free: int, most: int, impatient: bool = False) -> Verdict:
    """What has to happen before a model can be loaded. `free`: bytes where it is to be; `most`: models at a time, 0 for
    any number.

    The least recently used of those that have nothing to do leaves first; for memory, of those that take some of the
    same. If all have something, the newcomer waits; when it has waited long enough to be `impatient`, one of them is to
    leave as soon as it is done with what it has.
    """
    beside = [each for each in loaded if each.device == new.device]
    spare = free - sum(max(0, each.memory - each.held) for each in beside if each.state == "loading")
    reachable = spare + sum(max(each.memory, each.held) for each in beside)
    where = "memory" if new.device == "cpu" else "GPU memory"
    if new.hopeless and reachable < new.hopeless + MARGIN:
        return Verdict("never", reason=f"there is too little {where} for it")
    full = 0 < most <= len(loaded)
    if new.too_little:
        short = spare < new.too_little + MARGIN
    else:
        # If nobody's leaving would be enough by this rough measure, let it try: it knows exactly.
        short = spare < new.estimate <= reachable
    if not full and not (short and beside):
        return Verdict("start")
    reason = f"{len(loaded)} models are loaded, as many as may be" if full else f"{where} is short"
    concerned = loaded if full else beside
    if any(each.state == "leaving" for each in concerned):
        return Verdict("wait", reason=reason)
    movable = [each for each in concerned if each.state == "settled" and (impatient or not each.busy)]
    if not movable:
        return Verdict("wait", reason=f"{reason}, and all of them are in use")
    return Verdict("evict", min(movable, key=lambda each: (each.busy, each.used_at)).key, reason)
