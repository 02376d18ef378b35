"""Cosine and sine tables of rotary position embeddings, with the scaling types of long-context models."""

from __future__ import annotations

import math
from typing import Any

import torch

from syringa.engine.cpu.features import NO_MEMORY, available_memory
from syringa.errors import ModelError

_BYTES_PER_ANGLE = 16  # of the tables and of what they are computed from, all in fp32


def rotary_tables(rope: dict[str, Any], rotary: int, length: int, trained: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine tables, `[length, rotary / 2]` each, fp32. `trained`: max_position_embeddings.

    Raise `ModelError` for parameters that give no finite numbers, and for tables that do not fit in memory.
    """
    kind = rope.get("rope_type")
    try:
        frequencies, attention = _frequencies(rope, rotary, length, trained)
    except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise ModelError(f"the rotary embedding of type {kind!r} cannot be computed: {error!r}") from None
    if not (frequencies * length * attention).isfinite().all():
        raise ModelError(f"the rotary embedding of type {kind!r} has no finite numbers: fetch the model again")
    need, have = _BYTES_PER_ANGLE * length * rotary // 2, available_memory()
    if need > have:
        raise ModelError(
            f"a context of {length:,} tokens needs {need / 2**30:,.1f} GiB for its positions alone and "
            f"{have / 2**30:.1f} GiB are free: choose a smaller --max-model-len",
            code=NO_MEMORY,
        )
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies[None, :].float()
    return (angles.cos() * attention).contiguous(), (angles.sin() * attention).contiguous()


def _frequencies(rope: dict[str, Any], rotary: int, length: int, trained: int) -> tuple[torch.Tensor, float]:
    kind, theta = rope["rope_type"], rope["rope_theta"]
    plain = 1.0 / (theta ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))
    match kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / rope["factor"], 1.0
        case "dynamic":
            longest = max(length, trained)
            stretched = theta * ((rope["factor"] * longest / trained) - (rope["factor"] - 1)) ** (rotary / (rotary - 2))
            return 1.0 / (stretched ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)), 1.0
        case "llama3":
            return _llama3(rope, plain), 1.0
        case "yarn":
            return _yarn(rope, rotary, plain, trained)
        case "longrope":
            return _longrope(rope, rotary, plain, length, trained)
    raise ModelError(f"rope scaling of type {kind!r} is not supported")


def _llama3(rope: dict[str, Any], plain: torch.Tensor) -> torch.Tensor:
    original = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    waves = 2 * math.pi / plain
    blend = (original / waves - low) / (high - low)
    scaled = torch.where(waves > original / low, plain / rope["factor"], plain)
    between = (waves <= original / low) & (waves >= original / high)
    return torch.where(between, (1 - blend) * plain / rope["factor"] + blend * plain, scaled)


def _yarn(rope: dict[str, Any], rotary: int, plain: torch.Tensor, trained: int) -> tuple[torch.Tensor, float]:
    original = rope.get("original_max_position_embeddings") or trained
    factor = rope.get("factor") or trained / original

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        if rope.get("mscale") and rope.get("mscale_all_dim"):
            attention = magnitude(factor, rope["mscale"]) / magnitude(factor, rope["mscale_all_dim"])
        else:
            attention = magnitude(factor)

    def dimension_at(rotations: float) -> float:
        return rotary * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low, high = dimension_at(rope.get("beta_fast") or 32), dimension_at(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    ramp = ((torch.arange(rotary // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / factor * ramp + plain * (1 - ramp), float(attention)


def _longrope(
    rope: dict[str, Any], rotary: int, plain: torch.Tensor, length: int, trained: int
) -> tuple[torch.Tensor, float]:
    original = rope.get("original_max_position_embeddings") or trained
    factor = rope.get("factor") or trained / original
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    chosen = rope["long_factor"] if length > original else rope["short_factor"]
    return plain / torch.tensor(chosen, dtype=torch.float32), float(attention)
