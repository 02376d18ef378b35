"""Which models stay in memory: when a model may be loaded, and which one is evicted for it. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from syringa.engine.loading.gpu_size import GPU_OVERHEAD as GPU_OVERHEAD

Device = Literal["cpu", "cuda"]
"""The memory that a model uses: the host's or the GPU's."""

GPU_GROWTH = 1.05  # of the weights, while they are in use
MARGIN = 256 << 20  # free memory fluctuates: less than this is no reason to try again


@dataclass(frozen=True, kw_only=True)
class ResidentModel:
    """A replica of a model in memory, or being loaded or unloaded; for `models_to_unload`, all of them together."""

    key: str  # of the replica
    model: str = ""  # key of the model
    device: Device = "cpu"
    gpu: int = 0  # which one, on "cuda"
    used_at: float
    busy: bool = False
    state: Literal["loading", "loaded", "unloading"] = "loaded"
    memory: int = 0  # bytes once it is loaded and its cache is filled
    held: int = 0  # bytes now
    idle_timeout: float = 0.0  # seconds without use after which it is unloaded; 0: never
    released: bool = False  # no longer configured


@dataclass(frozen=True, kw_only=True)
class PendingModel:
    """A replica of a model to be loaded."""

    model: str = ""
    device: Device = "cpu"
    gpu: int = 0
    estimate: int  # bytes, from its files
    insufficient_free: int = 0  # free bytes when loading failed for lack of memory
    insufficient_when_empty: int = 0  # the same, with no other model on the device


@dataclass(frozen=True)
class LoadDecision:
    action: Literal["start", "evict", "wait", "never"]
    key: str = ""  # the replica to evict
    reason: str = ""
    spare: int = 0  # bytes that it may use, for "start": what is free, less what others will take


def estimate_gpu_memory(weights: int) -> int:
    """Return the bytes that a model with so many bytes of weights needs on a GPU, without its KV cache."""
    return int(weights * GPU_GROWTH) + GPU_OVERHEAD


def gpu_memory_share(own: int, others: Sequence[int], *, total: int) -> float:
    """Return the fraction of a GPU's `total` bytes that a model may use: what it needs and an equal part of the rest.

    The KV cache takes all it is given, so the first model would leave nothing to the `others` that may be loaded with
    it. 1.0 if there are no others or they do not fit together.
    """
    rest = total - own - sum(others)
    if not others or rest <= 0:
        return 1.0
    return (own + rest / (1 + len(others))) / total


def models_to_unload(resident: Sequence[ResidentModel], now: float) -> list[str]:
    """Return the keys of models that were idle for too long or are no longer configured."""
    return [
        each.key
        for each in resident
        if each.state == "loaded" and not each.busy and (each.released or 0 < each.idle_timeout <= now - each.used_at)
    ]


def decide_load(
    new: PendingModel, resident: Sequence[ResidentModel], *, free: int, max_loaded: int, evict_busy: bool = False
) -> LoadDecision:
    """Decide what must happen before a model is loaded: nothing, an eviction, or waiting.

    `free`: bytes on the model's device; `max_loaded`: 0 for any number. The least recently used idle replica is evicted
    first; for memory, only those on the same device count. If all are busy, the new one waits. With `evict_busy`, a
    busy one is evicted, which finishes its requests first. Nothing is evicted for a model that would not fit then.
    """
    same_device = [each for each in resident if (each.device, each.gpu) == (new.device, new.gpu)]
    spare = free - sum(max(0, each.memory - each.held) for each in same_device)
    reachable = spare + sum(max(each.memory, each.held) for each in same_device)
    memory = "memory" if new.device == "cpu" else "GPU memory"
    models = {each.model or each.key for each in resident} - {new.model}
    full = 0 < max_loaded <= len(models)
    if _never_fits(new, reachable, alone=not same_device, full=full):
        return LoadDecision("never", reason=f"there is too little {memory} for it")
    if new.insufficient_free:
        short = spare < new.insufficient_free + MARGIN
    else:
        # If even evicting all would not be enough, it may try: the worker explains what would fit.
        short = spare < new.estimate <= reachable
    if not full and not (short and same_device):
        return LoadDecision("start", spare=spare)
    reason = f"{len(models)} models are loaded, the most allowed" if full else f"{memory} is short"
    candidates = resident if full else same_device
    if any(each.state == "unloading" for each in candidates):
        return LoadDecision("wait", reason=reason)
    evictable = [each for each in candidates if each.state == "loaded" and (evict_busy or not each.busy)]
    if not evictable:
        return LoadDecision("wait", reason=f"{reason}, and all of them are in use")
    return LoadDecision("evict", min(evictable, key=lambda each: (each.busy, each.used_at)).key, reason)


def strictest(decisions: Sequence[LoadDecision]) -> LoadDecision:
    """Return the decision for a model that needs several GPUs, from those for each of them."""
    order = ("never", "wait", "evict", "start")
    found = min(decisions, key=lambda each: order.index(each.action))
    return replace(found, spare=min(each.spare for each in decisions))


def _never_fits(new: PendingModel, reachable: int, *, alone: bool, full: bool) -> bool:
    """Return whether a model would not fit if all others were evicted, of which `reachable` bytes would be the result.

    On a CPU its need is known exactly from its files; on a GPU, from an attempt to load it.
    """
    if new.insufficient_when_empty and reachable < new.insufficient_when_empty + MARGIN:
        return True
    if alone:
        return False
    if new.device == "cpu":
        return new.estimate > reachable and bool(new.insufficient_free or full)
    return bool(new.insufficient_free) and reachable < new.insufficient_free + MARGIN
