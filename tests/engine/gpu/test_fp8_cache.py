"""The KV cache in FP8: kernels under Triton's interpreter, the reference, and the whole decoder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from syringa.engine.gpu.cache import FP8, FP8_MAX, GpuCacheShape, store_tokens
from syringa.engine.gpu.kernels import reference, rotary
from syringa.engine.gpu.kernels.batch_invariant_attention import batch_invariant_decode_attention
from syringa.engine.gpu.kernels.decode_attention import DecodeConfig, NewTokens, decode_attention
from syringa.engine.gpu.kernels.prefill_attention import PrefillConfig, prefill_attention, query_tiles
from tests.engine.gpu.kernel_inputs import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    PagedCache,
    nan_filled,
    random,
    relative_error,
)

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 64, 16


def representable(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return random numbers that FP8 holds exactly: the interpreter does not round to FP8 as the hardware does."""
    return random(*shape, seed=seed).to(FP8).float()


def fp8_cache(lengths: list[int]) -> PagedCache:
    cache = PagedCache(lengths, KV_HEADS, SIZE, BLOCK)
    cache.keys, cache.values = cache.keys.to(FP8), cache.values.to(FP8)
    return cache


def test_store_tokens_saturates_in_fp8() -> None:
    cache = torch.zeros(2, 1, BLOCK, 2, dtype=FP8)
    store_tokens(cache, torch.tensor([1]), torch.tensor([3]), torch.tensor([[[1000.0, -1000.0]]]))
    assert cache.float()[1, 0, 3].tolist() == [FP8_MAX, -FP8_MAX]
    assert int(cache.float().count_nonzero()) == 2


def test_copy_blocks_copies_fp8_blocks() -> None:
    shape = GpuCacheShape(2, KV_HEADS, SIZE, FP8, torch.device("cpu"))
    assert shape.bytes_per_block == 2 * 2 * KV_HEADS * SIZE * BLOCK
    cache = shape.allocate(4)
    for tensor in (cache.keys, cache.values):
        tensor.view(torch.uint8).copy_(torch.randint(0, 120, tensor.shape, dtype=torch.uint8))
    before = cache.keys.view(torch.uint8).clone()
    cache.copy_blocks([(0, 3), (2, 1)])
    after = cache.keys.view(torch.uint8)
    assert torch.equal(after[:, [3, 1]], before[:, [0, 2]])
    assert torch.equal(after[:, [0, 2]], before[:, [0, 2]])


def test_rotate_and_store_writes_saturated_fp8() -> None:
    qkv = representable(3, (HEADS + 2 * KV_HEADS) * SIZE)
    qkv[1, -1] = 1e4  # a value beyond the range
    positions, slots = torch.tensor([0, 1, 17], dtype=torch.int32), torch.tensor([3, 16, -1])
    keys, values = (torch.zeros(2, KV_HEADS, BLOCK, SIZE, dtype=FP8) for _ in range(2))
    expected, expected_keys, expected_values = qkv.clone(), keys.clone(), values.clone()
    reference.rotate_and_store(expected, positions, slots, None, None, 0.0, expected_keys, expected_values, HEADS)
    rotary.rotate_and_store(qkv, positions, slots, None, None, 0.0, keys, values, HEADS)
    assert relative_error(qkv[:, : HEADS * SIZE], expected[:, : HEADS * SIZE]) < FP32_TOLERANCE
    assert float(values.float().max()) == FP8_MAX
    assert torch.equal(keys.float(), expected_keys.float())
    assert torch.equal(values.float(), expected_values.float())


# Queries in bf16, as in production, are multiplied in fp16, which the interpreter does.
with_both_dtypes = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, FP32_TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)], ids=["fp32", "bf16"]
)


@with_both_dtypes
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_attention_reads_fp8_cache(splits: int, dtype: torch.dtype, tolerance: float) -> None:
    cache = fp8_cache([1, 16, 0, 33, 70])
    q = random(5, HEADS * SIZE, dtype=dtype)
    expected = reference.decode_attention(q.view(5, HEADS, SIZE), cache.keys, cache.values, cache.tables, cache.lengths)
    out = decode_attention(
        q, cache.keys, cache.values, cache.tables, cache.lengths, HEADS,
        out=nan_filled(5, HEADS * SIZE, dtype=dtype), config=DecodeConfig(splits, keys=16, warps=1),
    )  # fmt: skip
    assert relative_error(out, expected.flatten(1)) < tolerance


def test_decode_attention_stores_new_tokens_in_fp8() -> None:
    """The new token is attended as it is stored, so that a later step or a prefill sees the same."""
    lengths = [1, 17, 33]
    cache = fp8_cache(lengths)
    slots = torch.tensor([cache.slot(s, n - 1) for s, n in enumerate(lengths)])
    qkv = representable(3, (HEADS + 2 * KV_HEADS) * SIZE, seed=8)
    qkv[2, -1] = 1e4
    rows, keys, values = qkv.clone(), cache.keys.clone(), cache.values.clone()
    reference.rotate_and_store(rows, cache.lengths - 1, slots, None, None, 0.0, keys, values, HEADS)
    queries = rows[:, : HEADS * SIZE].view(3, HEADS, SIZE)
    expected = reference.decode_attention(queries, keys, values, cache.tables, cache.lengths)
    out = decode_attention(
        qkv, cache.keys, cache.values, cache.tables, cache.lengths, HEADS, new=NewTokens(slots, None, None, 0.0),
        out=nan_filled(3, HEADS * SIZE), config=DecodeConfig(2, keys=16, warps=1),
    )  # fmt: skip
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE
    torch.testing.assert_close(cache.keys.float(), keys.float(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(cache.values.view(torch.uint8), values.view(torch.uint8))


@with_both_dtypes
def test_prefill_attention_reads_fp8_cache(dtype: torch.dtype, tolerance: float) -> None:
    first, starts = [0, 20], [0, 25, 43]
    cache = fp8_cache([25, 38])
    q = random(43, HEADS * SIZE, dtype=dtype)
    row_starts, first_positions = torch.tensor(starts, dtype=torch.int32), torch.tensor(first, dtype=torch.int32)
    expected = reference.paged_attention(
        q.view(43, HEADS, SIZE), cache.keys, cache.values, cache.tables, row_starts, first_positions
    )
    out = prefill_attention(
        q, cache.keys, cache.values, cache.tables, query_tiles(starts, first, 16), row_starts, first_positions, HEADS,
        out=nan_filled(43, HEADS * SIZE, dtype=dtype), config=PrefillConfig(rows=16, keys=16, warps=1),
    )  # fmt: skip
    assert relative_error(out, expected.flatten(1)) < tolerance


def test_batch_invariant_decode_attention_reads_fp8_cache() -> None:
    cache = fp8_cache([1, 33])
    q = random(2, HEADS * SIZE)
    expected = reference.decode_attention(q.view(2, HEADS, SIZE), cache.keys, cache.values, cache.tables, cache.lengths)
    out = batch_invariant_decode_attention(q, cache.keys, cache.values, cache.tables, cache.lengths, HEADS)
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE


def test_fp8_cache_shape_halves_the_bytes_of_a_block() -> None:
    shape = GpuCacheShape(2, KV_HEADS, SIZE, torch.bfloat16, torch.device("cpu"))
    assert 2 * replace(shape, dtype=FP8).bytes_per_block == shape.bytes_per_block
