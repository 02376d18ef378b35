"""Check of a loaded model: the logits of a sequence must not depend on chunking or on the rest of the batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from syringa.engine.execution.batch import StepTensors
from syringa.engine.loading.loaded_model import CacheShape
from syringa.engine.models.decoder import Model
from syringa.engine.models.hf.attention import UnsupportedModel
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

if TYPE_CHECKING:
    from syringa.engine.gpu.cache import GpuCacheShape


def check_batching(model: Model, shape: CacheShape | GpuCacheShape, vocabulary: int, tolerance: float = 0.01) -> None:
    """Compare the logits of a prompt computed at once with those of two chunks in a batch with another sequence.

    Raise `UnsupportedModel` if they differ by more than `tolerance` (a GPU rounds products of other sizes differently).
    This finds what the shape probe cannot: models that count positions themselves or mix tokens outside attention.
    """
    cache: Any = shape.allocate(3)
    prompt = [(7 * i + 3) % vocabulary for i in range(12)]
    whole = model.forward(_step([(prompt, 0, 0)]), cache)
    other = prompt[::-1]
    model.forward(_step([(other[:7], 0, 1), (prompt[:5], 0, 2)]), cache)
    pieces = model.forward(_step([(other[7:], 7, 1), (prompt[5:], 5, 2)]), cache)[-1:]
    difference, peak = float((whole - pieces).abs().max()), float(whole.abs().max())
    if not math.isfinite(peak) or difference > tolerance * peak:
        raise UnsupportedModel("its output depends on the rest of the batch, so it mixes tokens outside attention")


def _step(sequences: list[tuple[list[int], int, int]]) -> StepTensors:
    """Return a step of one-block sequences, given as (tokens, first position, block), with logits of last rows."""
    positions = [torch.arange(first, first + len(tokens)) for tokens, first, _ in sequences]
    lengths = torch.tensor([0] + [len(tokens) for tokens, _, _ in sequences])
    starts = lengths.cumsum(0)
    return StepTensors(
        tokens=torch.tensor([token for tokens, _, _ in sequences for token in tokens]),
        positions=torch.cat(positions).int(),
        slot_mapping=torch.cat(
            [at + block * BLOCK_SIZE for at, (_, _, block) in zip(positions, sequences, strict=True)]
        ),
        row_starts=starts.int(),
        first_positions=torch.tensor([first for _, first, _ in sequences], dtype=torch.int32),
        block_tables=torch.tensor([[block] for _, _, block in sequences], dtype=torch.int32),
        logit_rows=starts[1:] - 1,
    )
