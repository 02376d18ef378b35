from __future__ import annotations

import pytest
import torch

from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.gpu.kernels import decode_attention as decode
from syringa.engine.gpu.kernels import launch, reference
from syringa.engine.gpu.kernels import prefill_attention as prefill
from syringa.engine.gpu.kernels.decode_attention import DecodeConfig, NewTokens, decode_attention
from syringa.engine.gpu.kernels.prefill_attention import PrefillConfig, prefill_attention, query_tiles
from tests.engine.gpu.paged import EXACT, Paged, distance, poisoned, random

SHAPES = [
    pytest.param(4, 2, 64, 16, 0, id="grouped"),
    pytest.param(16, 1, 32, 16, 0, id="sixteen-share-one"),
    pytest.param(2, 2, 96, 16, 0, id="size-96"),
    pytest.param(2, 1, 256, 16, 0, id="size-256"),
    pytest.param(4, 2, 64, 16, 20, id="window"),
    pytest.param(4, 2, 64, 32, 1, id="window-of-one"),
    pytest.param(4, 2, 64, 8, 45, id="small-blocks"),
]


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "window"), SHAPES)
@pytest.mark.parametrize(("splits", "shortest"), [(1, 1), (3, 1), (4, 40)])
def test_decode_attention(
    heads: int, kv_heads: int, size: int, block: int, window: int, splits: int, shortest: int
) -> None:
    cache = Paged([1, 16, 0, 33, 70], kv_heads, size, block)
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
        out=poisoned(5, heads * size),
        config=DecodeConfig(splits, shortest, keys=16, warps=1),
    )
    assert distance(out, expected.flatten(1)) < EXACT
    assert not out[2].any(), "padding gives zeros"
    assert not launch.scratch(q.device, 0, 0)[1].any(), "a counter was left behind"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "turned", "normed", "window"),
    [(4, 2, 64, 64, True, 0), (2, 2, 96, 32, False, 0), (4, 1, 64, 0, True, 18), (4, 2, 64, 64, False, 1)],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_attention_that_stores_the_new_tokens(
    heads: int, kv_heads: int, size: int, turned: int, normed: bool, window: int, splits: int
) -> None:
    """As storing first and attending then."""
    lengths = [1, 17, 0, 33, 70]
    cache = Paged(lengths, kv_heads, size)
    slots = torch.tensor([cache.slot(s, n - 1) if n else -1 for s, n in enumerate(lengths)])
    for at in slots[slots >= 0].tolist():  # not there yet
        cache.keys[at // 16, :, at % 16] = float("nan")
        cache.values[at // 16, :, at % 16] = float("nan")
    rotary = rotary_tables({"rope_type": "default", "rope_theta": 1e4}, turned, 100, 100) if turned else None
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
        out=poisoned(5, heads * size),
        config=DecodeConfig(splits, keys=16, warps=1),
    )
    assert distance(out, expected.flatten(1)) < EXACT
    assert torch.equal(cache.keys.isnan(), keys.isnan())
    assert distance(cache.keys.nan_to_num(), keys.nan_to_num()) < EXACT
    assert torch.equal(cache.values.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "window"), SHAPES)
def test_prefill_attention(heads: int, kv_heads: int, size: int, block: int, window: int) -> None:
    """Sequences that begin, go on, have one row, and have none, in one launch."""
    first, counts = [0, 20, 37, 5], [25, 18, 1, 0]
    cache = Paged([f + c for f, c in zip(first, counts, strict=True)], kv_heads, size, block)
    starts = [0, 25, 43, 44, 44]
    q = random(44, (heads + 2 * kv_heads) * size)  # rows as they come, keys and values behind the queries
    config = PrefillConfig(rows=16, keys=16, warps=1)
    begins, places = torch.tensor(starts, dtype=torch.int32), torch.tensor(first, dtype=torch.int32)
    width = heads * size
    expected = reference.paged_attention(
        q[:, :width].unflatten(1, (heads, size)), cache.keys, cache.values, cache.tables, begins, places, window=window
    )
    out = prefill_attention(
        q,
        cache.keys,
        cache.values,
        cache.tables,
        query_tiles(starts, first, 16),
        begins,
        places,
        heads,
        window=window,
        out=poisoned(44, width),
        config=config,
    )
    assert distance(out, expected.flatten(1)) < EXACT


def test_the_choices_by_shape() -> None:
    """Few sequences are shared by many programs; the batch's size alone decides, so a graph can be captured."""
    cache = Paged([50, 3], 2, 64)
    q = random(2, 4 * 64)
    expected = reference.decode_attention(q.view(2, 4, 64), *cache_parts(cache)).flatten(1)
    assert distance(decode_attention(q, *cache_parts(cache), 4), expected) < EXACT
    assert decode.choose(1, 8, 128).splits == 16
    assert [decode.choose(rows, 8, 128).splits for rows in (64, 128, 256)] == [2, 2, 1]
    assert prefill.choose(256).rows == prefill.choose(64).rows == prefill.ROWS


def cache_parts(cache: Paged) -> tuple[torch.Tensor, ...]:
    return cache.keys, cache.values, cache.tables, cache.lengths


def test_the_longest_walks_come_first() -> None:
    tiles = query_tiles([0, 33, 33, 34], [0, 9, 100], 16).tolist()
    assert tiles == [[2, 0], [0, 32], [0, 16], [0, 0]]
    assert query_tiles([0], [], 16).shape == (0, 2)


def test_the_reference_agrees_with_the_library() -> None:
    cache = Paged([24], 2, 64)
    q = random(24, 4, 64)
    out = reference.paged_attention(q, cache.keys, cache.values, cache.tables, torch.tensor([0, 24]), torch.tensor([0]))
    blocks = cache.tables[0, :2].long()
    k, v = (c[blocks].transpose(0, 1).flatten(1, 2)[:, :24].float() for c in (cache.keys, cache.values))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], is_causal=True, enable_gqa=True
    )
    assert distance(out, expected[0].transpose(0, 1)) < EXACT
