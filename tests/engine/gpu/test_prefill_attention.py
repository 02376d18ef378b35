from __future__ import annotations

from typing import Any

import pytest
import torch

from syringa.engine.gpu.kernels import prefill_attention as prefill
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.kernels.prefill_attention import PrefillConfig, has_all_keys, prefill_attention, query_tiles
from syringa.engine.gpu.ops.triton_ops import TritonOps
from tests.engine.gpu.kernel_inputs import (
    ATTENTION_SHAPES,
    FP32_TOLERANCE,
    PagedCache,
    nan_filled,
    random,
    relative_error,
)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "window"), ATTENTION_SHAPES)
def test_prefill_attention_matches_reference(heads: int, kv_heads: int, size: int, block: int, window: int) -> None:
    """Sequences that start, continue, have one row, and have none, in one launch."""
    first, counts = [0, 20, 37, 5], [25, 18, 1, 0]
    cache = PagedCache([f + c for f, c in zip(first, counts, strict=True)], kv_heads, size, block)
    starts = [0, 25, 43, 44, 44]
    q = random(44, (heads + 2 * kv_heads) * size)  # [q | k | v] rows
    config = PrefillConfig(rows=16, keys=16, warps=1)
    row_starts, first_positions = torch.tensor(starts, dtype=torch.int32), torch.tensor(first, dtype=torch.int32)
    width = heads * size
    expected = reference.paged_attention(
        q[:, :width].unflatten(1, (heads, size)),
        cache.keys,
        cache.values,
        cache.tables,
        row_starts,
        first_positions,
        window=window,
    )
    out = prefill_attention(
        q,
        cache.keys,
        cache.values,
        cache.tables,
        query_tiles(starts, first, 16),
        row_starts,
        first_positions,
        heads,
        window=window,
        out=nan_filled(44, width),
        config=config,
    )
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "window"), ATTENTION_SHAPES)
@pytest.mark.parametrize("first", [(0, 20, 0, 5), (0, 0, 0, 0), (32, 16, 4, 1)])
def test_prefill_attention_reads_keys_of_the_step_from_its_rows(
    first: tuple[int, ...], heads: int, kv_heads: int, size: int, block: int, window: int
) -> None:
    counts, starts = [150, 18, 33, 0], [0, 150, 168, 201, 201]
    cache = PagedCache([f + c for f, c in zip(first, counts, strict=True)], kv_heads, size, block)
    rows = random(201, (heads + 2 * kv_heads) * size + 16)  # gates may follow
    width = heads * size
    k, v = rows[:, width : width + 2 * kv_heads * size].unflatten(1, (2, kv_heads, size)).unbind(1)
    layout = torch.tensor(starts, dtype=torch.int32), torch.tensor(first, dtype=torch.int32)
    for s, count in enumerate(counts):
        for i in range(count):
            slot = cache.slot(s, first[s] + i)
            cache.keys[slot // block, :, slot % block] = k[starts[s] + i]
            cache.values[slot // block, :, slot % block] = v[starts[s] + i]
    q = rows[:, :width].unflatten(1, (heads, size))
    expected = reference.paged_attention(q, cache.keys, cache.values, cache.tables, *layout, window=window)
    for s, count in enumerate(counts):
        for i in range(count if size != 96 else 0):  # a descriptor cannot load those
            slot = cache.slot(s, first[s] + i)
            cache.keys[slot // block, :, slot % block] = float("inf")
    ops = TritonOps()
    tiles = torch.from_numpy(ops.plan_prefill(starts, first))
    tensors = cache.keys, cache.values, cache.tables, tiles, *layout
    out = ops.prefill_attention(rows, *tensors, heads, window, nan_filled(201, width), new_keys=True)
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE


def test_prefill_attention_of_a_sequence_ignores_what_is_not_finite_in_the_next() -> None:
    heads, kv_heads, size, starts, first = 2, 1, 64, [0, 25, 43], [0, 0]
    cache = PagedCache([25, 18], kv_heads, size)
    rows = random(43, (heads + 2 * kv_heads) * size)
    layout = torch.tensor(starts, dtype=torch.int32), torch.tensor(first, dtype=torch.int32)
    tensors = cache.keys, cache.values, cache.tables, query_tiles(starts, first, 16)

    def attend() -> torch.Tensor:
        config = PrefillConfig(rows=16, warps=1, row_keys=16)
        return prefill_attention(rows, *tensors, *layout, heads, from_rows=True, from_cache=False, config=config)

    expected = attend()[:25]
    rows[25:] = float("nan")
    assert torch.equal(attend()[:25], expected)


def test_keys_are_read_from_rows_only_where_the_cache_has_the_same() -> None:
    rows = random(3, 64)
    assert has_all_keys(rows, random(2, 1, 16, 32))
    assert not has_all_keys(rows, random(2, 1, 16, 32, dtype=torch.half))
    assert not has_all_keys(rows, random(2, 1, 16, 96))


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 0.0), (1, 0.0), (20, 2.0)])
def test_prefill_attention_adds_sinks_and_caps_scores(window: int, softcap: float) -> None:
    heads, kv_heads, size, first, starts = 4, 2, 64, [0, 20], [0, 25, 43]
    cache = PagedCache([25, 38], kv_heads, size)
    q, sinks = 3 * random(43, heads * size), 3 * random(heads, seed=4)
    layout = torch.tensor(starts, dtype=torch.int32), torch.tensor(first, dtype=torch.int32)
    tensors = cache.keys, cache.values, cache.tables
    options: dict[str, Any] = {"window": window, "scale": 0.2, "sinks": sinks, "softcap": softcap}
    expected = reference.paged_attention(q.unflatten(1, (heads, size)), *tensors, *layout, **options)
    out = prefill_attention(
        q,
        *tensors,
        query_tiles(starts, first, 16),
        *layout,
        heads,
        **options,
        out=nan_filled(43, heads * size),
        config=PrefillConfig(rows=16, keys=16, warps=1),
    )
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE


def test_reference_sinks_are_keys_without_values() -> None:
    """A sink is a key whose score is its logit and whose value is zero."""
    cache = PagedCache([24], 1, 64)
    q, sinks = random(1, 2, 64), random(2, seed=4)
    scores = (q[0] @ cache.keys[cache.tables[0, :2].long(), 0].flatten(0, 1)[:24].T) * 64**-0.5
    weights = torch.cat([scores, sinks[:, None]], dim=1).softmax(1)[:, :24]
    expected = weights @ cache.values[cache.tables[0, :2].long(), 0].flatten(0, 1)[:24]
    tensors = cache.keys, cache.values, cache.tables, cache.lengths
    out = reference.decode_attention(q, *tensors, sinks=sinks)
    assert relative_error(out[0], expected) < FP32_TOLERANCE


def test_prefill_config_has_fixed_rows() -> None:
    assert prefill.choose_config(256).rows == prefill.choose_config(64).rows == prefill.ROWS


def test_query_tiles_sorts_longest_first() -> None:
    tiles = query_tiles([0, 33, 33, 34], [0, 9, 100], 16).tolist()
    assert tiles == [[2, 0], [0, 32], [0, 16], [0, 0]]
    assert query_tiles([0], [], 16).shape == (0, 2)


def test_paged_attention_reference_matches_sdpa() -> None:
    cache = PagedCache([24], 2, 64)
    q = random(24, 4, 64)
    out = reference.paged_attention(q, cache.keys, cache.values, cache.tables, torch.tensor([0, 24]), torch.tensor([0]))
    blocks = cache.tables[0, :2].long()
    k, v = (c[blocks].transpose(0, 1).flatten(1, 2)[:, :24].float() for c in (cache.keys, cache.values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    assert relative_error(out, expected[0].transpose(0, 1)) < FP32_TOLERANCE
