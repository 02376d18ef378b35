from __future__ import annotations

import pytest
import torch

from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.gpu.kernels import decode_attention as decode
from syringa.engine.gpu.kernels import launch, reference
from syringa.engine.gpu.kernels.decode_attention import DecodeConfig, NewTokens, decode_attention
from tests.engine.gpu.kernel_inputs import (
    ATTENTION_SHAPES,
    FP32_TOLERANCE,
    PagedCache,
    nan_filled,
    random,
    relative_error,
)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "window"), ATTENTION_SHAPES)
@pytest.mark.parametrize(("splits", "min_keys_per_split"), [(1, 1), (3, 1), (4, 40)])
def test_decode_attention_matches_reference(
    heads: int, kv_heads: int, size: int, block: int, window: int, splits: int, min_keys_per_split: int
) -> None:
    cache = PagedCache([1, 16, 0, 33, 70], kv_heads, size, block)
    q = random(5, heads * size)
    expected = reference.decode_attention(
        q.view(5, heads, size), cache.keys, cache.values, cache.tables, cache.lengths, window=window
    )
    out = decode_attention(
        q,
        cache.keys,
        cache.values,
        cache.tables,
        cache.lengths,
        heads,
        window=window,
        out=nan_filled(5, heads * size),
        config=DecodeConfig(splits, min_keys_per_split, keys=16, warps=1),
    )
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE
    assert not out[2].any(), "padding rows are zero"
    assert not launch.get_workspace(q.device, 0, 0)[1].any(), "a counter was not reset"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary_dim", "normed", "window"),
    [(4, 2, 64, 64, True, 0), (2, 2, 96, 32, False, 0), (4, 1, 64, 0, True, 18), (4, 2, 64, 64, False, 1)],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_attention_stores_new_tokens(
    heads: int, kv_heads: int, size: int, rotary_dim: int, normed: bool, window: int, splits: int
) -> None:
    """The result must equal that of storing first and attending afterwards."""
    lengths = [1, 17, 0, 33, 70]
    cache = PagedCache(lengths, kv_heads, size)
    slots = torch.tensor([cache.slot(s, n - 1) if n else -1 for s, n in enumerate(lengths)])
    for at in slots[slots >= 0].tolist():  # not stored yet
        cache.keys[at // 16, :, at % 16] = float("nan")
        cache.values[at // 16, :, at % 16] = float("nan")
    rotary = rotary_tables({"rope_type": "default", "rope_theta": 1e4}, rotary_dim, 100, 100) if rotary_dim else None
    norms = (random(size, seed=5), random(size, seed=6)) if normed else None
    qkv = random(5, (heads + 2 * kv_heads) * size, seed=8)

    rows, keys, values = qkv.clone(), cache.keys.clone(), cache.values.clone()
    reference.rotate_and_store(rows, (cache.lengths - 1).clamp(min=0), slots, rotary, norms, 1e-6, keys, values, heads)
    q = rows[:, : heads * size].view(5, heads, size)
    expected = reference.decode_attention(q, keys, values, cache.tables, cache.lengths, window=window)

    out = decode_attention(
        qkv,
        cache.keys,
        cache.values,
        cache.tables,
        cache.lengths,
        heads,
        new=NewTokens(slots, rotary, norms, 1e-6),
        window=window,
        out=nan_filled(5, heads * size),
        config=DecodeConfig(splits, keys=16, warps=1),
    )
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE
    assert torch.equal(cache.keys.isnan(), keys.isnan())
    assert relative_error(cache.keys.nan_to_num(), keys.nan_to_num()) < FP32_TOLERANCE
    assert torch.equal(cache.values.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize(("heads", "kv_heads", "size", "window"), [(4, 2, 64, 0), (6, 2, 32, 20)])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("store", [False, True])
def test_decode_attention_adds_sinks_once(
    heads: int, kv_heads: int, size: int, window: int, splits: int, store: bool
) -> None:
    lengths = [1, 16, 0, 33, 70]
    cache = PagedCache(lengths, kv_heads, size)
    slots = torch.tensor([cache.slot(s, n - 1) if n else -1 for s, n in enumerate(lengths)])
    qkv, sinks = random(5, (heads + 2 * kv_heads) * size), 3 * random(heads, seed=4)
    if store:
        reference.rotate_and_store(qkv.clone(), slots, slots, None, None, 0.0, *cache_tensors(cache)[:2], heads)
    q = qkv[:, : heads * size].unflatten(1, (heads, size))
    expected = reference.decode_attention(q, *cache_tensors(cache), window=window, sinks=sinks)
    out = decode_attention(
        qkv,
        *cache_tensors(cache),
        heads,
        new=NewTokens(slots, None, None, 0.0) if store else None,
        window=window,
        sinks=sinks,
        out=nan_filled(5, heads * size),
        config=DecodeConfig(splits, keys=16, warps=1),
    )
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE
    assert not out[2].any(), "padding rows are zero"


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("store", [False, True])
def test_decode_attention_caps_scores(splits: int, store: bool) -> None:
    heads, kv_heads, size, lengths = 4, 2, 64, [1, 16, 70]
    cache = PagedCache(lengths, kv_heads, size)
    slots = torch.tensor([cache.slot(s, n - 1) for s, n in enumerate(lengths)])
    qkv = 3 * random(3, (heads + 2 * kv_heads) * size)
    if store:
        reference.rotate_and_store(qkv.clone(), slots, slots, None, None, 0.0, *cache_tensors(cache)[:2], heads)
    q = qkv[:, : heads * size].unflatten(1, (heads, size))
    expected = reference.decode_attention(q, *cache_tensors(cache), scale=0.3, softcap=2.0).flatten(1)
    new = NewTokens(slots, None, None, 0.0) if store else None
    config = DecodeConfig(splits, keys=16, warps=1)
    out = decode_attention(qkv, *cache_tensors(cache), heads, new=new, scale=0.3, softcap=2.0, config=config)
    assert relative_error(out, expected) < FP32_TOLERANCE


def test_decode_config_depends_on_batch_size_only() -> None:
    """Small batches are split among many programs; lengths do not matter, so that a CUDA graph can be captured."""
    cache = PagedCache([50, 3], 2, 64)
    q = random(2, 4 * 64)
    expected = reference.decode_attention(q.view(2, 4, 64), *cache_tensors(cache)).flatten(1)
    assert relative_error(decode_attention(q, *cache_tensors(cache), 4), expected) < FP32_TOLERANCE
    assert decode.choose_config(1, 8, 128).splits == 16
    assert [decode.choose_config(rows, 8, 128).splits for rows in (64, 128, 256)] == [2, 2, 1]


def cache_tensors(cache: PagedCache) -> tuple[torch.Tensor, ...]:
    return cache.keys, cache.values, cache.tables, cache.lengths
