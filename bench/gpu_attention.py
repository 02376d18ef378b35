"""Decode and prefill attention over a paged cache, checked and tuned, for `bench.gpu_kernels`."""

# ruff: noqa: B023
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton

from bench.kernel_harness import (
    DEVICE,
    Launch,
    PagedCache,
    add_row,
    best_configs,
    check,
    check_deterministic_gpu,
    copies_beyond_l2,
    int_tensor,
    nan_tensor,
    random_tensor,
    rotary_tables,
    time_launches,
    tune,
)
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.kernels.decode_attention import DecodeConfig, NewTokens, decode_attention
from syringa.engine.gpu.kernels.prefill_attention import PrefillConfig, prefill_attention, query_tiles

DECODE_SHAPES = [(32, 1, 16000), (32, 1, 384), (32, 64, 384), (32, 256, 1024), (16, 1, 384), (16, 64, 384)]
DECODE = [(1, 64, 4, 4), (1, 64, 4, 5), (1, 32, 4, 4), (1, 32, 4, 5), (1, 128, 8, 3)]
PREFILL = [
    PrefillConfig(128, 32, 4, 4),
    PrefillConfig(128, 32, 4, 5),
    PrefillConfig(128, 64, 4, 3),
    PrefillConfig(128, 64, 4, 4),
    PrefillConfig(128, 128, 8, 3),
]


def bench_decode() -> None:
    for heads, kv_heads, size, window in ((32, 8, 128, 0), (16, 8, 128, 0), (8, 8, 64, 100), (16, 1, 96, 0)):
        cache = PagedCache([1, 700, 16, 129, 2000], kv_heads, size)
        qkv = random_tensor(5, (heads + 2 * kv_heads) * size)
        rotary, norms = (
            rotary_tables(2048, size),
            (random_tensor(size, dtype=torch.float32), random_tensor(size, dtype=torch.float32)),
        )
        new = NewTokens(cache.last_slots(), rotary, norms, 1e-6)
        work, keys, values = qkv.double(), cache.keys.double(), cache.values.double()
        reference.rotate_and_store(work, cache.lengths - 1, new.slots, rotary, norms, 1e-6, keys, values, heads)
        q = work[:, : heads * size].unflatten(1, (heads, size))
        expected = reference.decode_attention(
            q, keys, values, cache.tables, cache.lengths, window=window, dtype=torch.float64
        )
        for splits in (1, 7, 32):
            options = {"heads": heads, "new": new, "window": window, "out": nan_tensor(5, heads * size)}
            config = DecodeConfig(splits)

            def launch(options: dict[str, Any] = options, config: DecodeConfig = config) -> torch.Tensor:
                return decode_attention(qkv, *cache.tensors, config=config, **options)

            check("decode_attention", launch(), expected.flatten(1), 1e-2)
            check_deterministic_gpu("decode_attention", launch)
    for heads, batch, length in DECODE_SHAPES:
        kv_heads, size = 8, 128
        read = 2 * batch * length * kv_heads * size * 2
        caches = [PagedCache([length] * batch, kv_heads, size) for _ in range(min(8, copies_beyond_l2(read)))]
        qkv = random_tensor(batch, (heads + 2 * kv_heads) * size)
        rotary, norms = (
            rotary_tables(length, size),
            (random_tensor(size, dtype=torch.float32), random_tensor(size, dtype=torch.float32)),
        )
        out = nan_tensor(batch, heads * size)
        new_tokens = [NewTokens(c.last_slots(), rotary, norms, 1e-6) for c in caches]

        def launches(config: DecodeConfig) -> list[Launch]:
            return [
                lambda c=c, new=new: decode_attention(qkv, *c.tensors, heads, new=new, out=out, config=config, pdl=True)
                for c, new in zip(caches, new_tokens, strict=True)
            ]

        most = max(1, -(-528 // (batch * kv_heads)))
        counts = sorted({most, max(1, most // 2), 2 * most, 1} if batch > 1 else {4, 8, 16, 64})
        shortlist = [DecodeConfig(s, *c) for c in DECODE[:2] for s in counts]
        config, _ = tune(launches, shortlist, f"decode {heads} {batch}x{length} splits")
        config, us = tune(
            launches, [DecodeConfig(config.splits, *c) for c in DECODE], f"decode {heads} {batch}x{length} tiles"
        )
        best_configs[heads, batch] = config
        q, k, v = (random_tensor(batch, h, n, size) for h, n in ((heads, 1), (kv_heads, length), (kv_heads, length)))
        library = time_launches([lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)])
        add_row(f"decode {heads}/8 {batch}x{length}", us, read, "GB/s", f"SDPA {library:.1f}", config)


def bench_prefill() -> None:
    for heads, kv_heads, size, window in ((32, 8, 128, 0), (8, 8, 64, 100), (16, 1, 96, 0), (4, 2, 256, 0)):
        first, counts = [0, 100, 333, 64], [257, 300, 1, 128]
        cache = PagedCache([f + c for f, c in zip(first, counts, strict=True)], kv_heads, size)
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        q = random_tensor(starts[-1], heads * size)
        layout = int_tensor(starts), int_tensor(first)
        expected = reference.paged_attention(
            q.unflatten(1, (heads, size)), *cache.tensors[:3], *layout, window=window, dtype=torch.float64
        )
        small = PrefillConfig(64, 32, 4, 2)
        for config in [small, *PREFILL] if heads == 32 else [small]:
            tiles = query_tiles(starts, first, config.rows).to(DEVICE)
            out = nan_tensor(*q.shape)
            try:
                prefill_attention(q, *cache.tensors[:3], tiles, *layout, heads, window=window, out=out, config=config)
            except triton.runtime.errors.OutOfResources:
                continue
            check("prefill_attention", out, expected.flatten(1), 1e-2)
    for heads, batch, count, earlier in ((32, 8, 2000, 0), (32, 4, 2048, 6144), (16, 8, 2000, 0)):
        kv_heads, size = 8, 128
        cache = PagedCache([earlier + count] * batch, kv_heads, size)
        starts, first = [count * i for i in range(batch + 1)], [earlier] * batch
        q = random_tensor(batch * count, heads * size)
        out = nan_tensor(*q.shape)
        layout = int_tensor(starts), int_tensor(first)

        def launches(config: PrefillConfig) -> list[Launch]:
            tiles = query_tiles(starts, first, config.rows).to(DEVICE)
            return [lambda: prefill_attention(q, *cache.tensors[:3], tiles, *layout, heads, out=out, config=config)]

        config, us = tune(launches, PREFILL, f"prefill {heads} {batch}x{count}+{earlier}")
        work = 4 * heads * size * batch * count * (earlier + (count + 1) / 2)
        other = ""
        if not earlier:
            a, b, c = (random_tensor(batch, h, count, size) for h in (heads, kv_heads, kv_heads))
            library = time_launches([lambda: F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)])
            other = f"SDPA {library:.1f}"
        add_row(f"prefill {heads}/8 {batch}x{count}+{earlier}", us, work, "TFLOP/s", other, config)
