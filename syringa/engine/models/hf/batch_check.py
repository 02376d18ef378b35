"""Whether a model gives a sequence the same logits whatever it is computed with: the last check before it is used."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from syringa.engine.execution.batch import StepTensors
from syringa.engine.loading.loader import CacheShape
from syringa.engine.models.decoder import Model
from syringa.engine.models.hf.attention import Unsupported
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.gpu.cache import GpuCacheShape


def check_batching(model: Model, shape: CacheShape | GpuCacheShape, vocabulary: int, tolerance: float = 0.01) -> None:
    """Computes a short prompt whole, then in two pieces behind another sequence. The logits must be the same.

    Within `tolerance`, as a GPU rounds products of another size elsewhere. This finds what a walk without weights
    cannot: positions of the model's own counting, or tokens mixed elsewhere.
    """
    cache: Any = shape.allocate(3)
    prompt = [(7 * i + 3) % vocabulary for i in range(12)]
    whole = model.forward(_step([(prompt, 0, 0)]), cache)
    other = prompt[::-1]
    model.forward(_step([(other[:7], 0, 1), (prompt[:5], 0, 2)]), cache)
    pieces = model.forward(_step([(other[7:], 7, 1), (prompt[5:], 5, 2)]), cache)[-1:]
    difference, peak = float((whole - pieces).abs().max()), float(whole.abs().max())
    if not math.isfinite(peak) or difference > tolerance * peak:
        raise Unsupported("its answers change with what is in the batch, so it mixes tokens outside attention")


def _step(sequences: list[tuple[list[int], int, int]]) -> StepTensors:
    """A step of sequences of one block each, as (tokens, first position, block). The last row of each is wanted."""
    positions = [torch.arange(first, first + len(tokens)) for tokens, first, _ in sequences]
    lengths = torch.tensor([0] + [len(tokens) for tokens, _, _ in sequences])
    starts = lengths.cumsum(0)
    return StepTensors(
        tokens=torch.tensor([token for tokens, _, _ in sequences for token in tokens]),
        positions=torch.cat(positions).int(),
        slots=torch.cat([at + block * BLOCK_SIZE for at, (_, _, block) in zip(positions, sequences, strict=True)]),
        starts=starts.int(),
        first=torch.tensor([first for _, first, _ in sequences], dtype=torch.int32),
        tables=torch.tensor([[block] for _, _, block in sequences], dtype=torch.int32),
        wanted=starts[1:] - 1,
    )
