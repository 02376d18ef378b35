"""Attention, for `bench.gpu_kernels`: ours over a paged cache, and FlashInfer's beside it."""

# ruff: noqa: B023
from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton

from bench.gpu_lab import (
    BF16,
    BLOCK,
    DEVICE,
    Cache,
    Launch,
    best,
    check,
    copies,
    failed,
    ints,
    nan,
    rand,
    report,
    row,
    same_bits,
    timed,
    turning,
    winners,
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


def decodes() -> None:
    for heads, kv_heads, size, window in ((32, 8, 128, 0), (16, 8, 128, 0), (8, 8, 64, 100), (16, 1, 96, 0)):
        cache = Cache([1, 700, 16, 129, 2000], kv_heads, size)
        qkv = rand(5, (heads + 2 * kv_heads) * size)
        rotary, norms = turning(2048, size), (rand(size, dtype=torch.float32), rand(size, dtype=torch.float32))
        new = NewTokens(cache.last_slots(), rotary, norms, 1e-6)
        work, keys, values = qkv.double(), cache.keys.double(), cache.values.double()
        reference.rotate_and_store(work, cache.lengths - 1, new.slots, rotary, norms, 1e-6, keys, values, heads)
        q = work[:, : heads * size].unflatten(1, (heads, size))
        expected = reference.decode_attention(
            q, keys, values, cache.tables, cache.lengths, window=window, dtype=torch.float64
        )
        for splits in (1, 7, 32):
            options = {"heads": heads, "new": new, "window": window, "out": nan(5, heads * size)}
            config = DecodeConfig(splits)

            def launch(options: dict[str, Any] = options, config: DecodeConfig = config) -> torch.Tensor:
                return decode_attention(qkv, *cache.parts, config=config, **options)

            check("decode_attention", launch(), expected.flatten(1), 1e-2)
            same_bits("decode_attention", launch)
    for heads, batch, length in DECODE_SHAPES:
        kv_heads, size = 8, 128
        read = 2 * batch * length * kv_heads * size * 2
        caches = [Cache([length] * batch, kv_heads, size) for _ in range(min(8, copies(read)))]
        qkv = rand(batch, (heads + 2 * kv_heads) * size)
        rotary, norms = turning(length, size), (rand(size, dtype=torch.float32), rand(size, dtype=torch.float32))
        out = nan(batch, heads * size)
        news = [NewTokens(c.last_slots(), rotary, norms, 1e-6) for c in caches]

        def launches(config: DecodeConfig) -> list[Launch]:
            return [
                lambda c=c, new=new: decode_attention(qkv, *c.parts, heads, new=new, out=out, config=config, pdl=True)
                for c, new in zip(caches, news, strict=True)
            ]

        most = max(1, -(-528 // (batch * kv_heads)))
        counts = sorted({most, max(1, most // 2), 2 * most, 1} if batch > 1 else {4, 8, 16, 64})
        shortlist = [DecodeConfig(s, *c) for c in DECODE[:2] for s in counts]
        config, _ = best(launches, shortlist, f"decode {heads} {batch}x{length} splits")
        config, us = best(
            launches, [DecodeConfig(config.splits, *c) for c in DECODE], f"decode {heads} {batch}x{length} tiles"
        )
        winners[heads, batch] = config
        q, k, v = (rand(batch, h, n, size) for h, n in ((heads, 1), (kv_heads, length), (kv_heads, length)))
        library = timed([lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)])
        row(f"decode {heads}/8 {batch}x{length}", us, read, "GB/s", f"SDPA {library:.1f}", config)


def prefills() -> None:
    for heads, kv_heads, size, window in ((32, 8, 128, 0), (8, 8, 64, 100), (16, 1, 96, 0), (4, 2, 256, 0)):
        first, counts = [0, 100, 333, 64], [257, 300, 1, 128]
        cache = Cache([f + c for f, c in zip(first, counts, strict=True)], kv_heads, size)
        starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        q = rand(starts[-1], heads * size)
        places = ints(starts), ints(first)
        expected = reference.paged_attention(
            q.unflatten(1, (heads, size)), *cache.parts[:3], *places, window=window, dtype=torch.float64
        )
        small = PrefillConfig(64, 32, 4, 2)
        for config in [small, *PREFILL] if heads == 32 else [small]:
            tiles = query_tiles(starts, first, config.rows).to(DEVICE)
            out = nan(*q.shape)
            try:
                prefill_attention(q, *cache.parts[:3], tiles, *places, heads, window=window, out=out, config=config)
            except triton.runtime.errors.OutOfResources:
                continue
            check("prefill_attention", out, expected.flatten(1), 1e-2)
    for heads, batch, count, earlier in ((32, 8, 2000, 0), (32, 4, 2048, 6144), (16, 8, 2000, 0)):
        kv_heads, size = 8, 128
        cache = Cache([earlier + count] * batch, kv_heads, size)
        starts, first = [count * i for i in range(batch + 1)], [earlier] * batch
        q = rand(batch * count, heads * size)
        out = nan(*q.shape)
        places = ints(starts), ints(first)

        def launches(config: PrefillConfig) -> list[Launch]:
            tiles = query_tiles(starts, first, config.rows).to(DEVICE)
            return [lambda: prefill_attention(q, *cache.parts[:3], tiles, *places, heads, out=out, config=config)]

        config, us = best(launches, PREFILL, f"prefill {heads} {batch}x{count}+{earlier}")
        work = 4 * heads * size * batch * count * (earlier + (count + 1) / 2)
        other = ""
        if not earlier:
            a, b, c = (rand(batch, h, count, size) for h in (heads, kv_heads, kv_heads))
            library = timed([lambda: F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)])
            other = f"SDPA {library:.1f}"
        row(f"prefill {heads}/8 {batch}x{count}+{earlier}", us, work, "TFLOP/s", other, config)


class Prompts:
    """Rows of several sequences for `FlashInferOps` and for our kernel, over one cache."""

    def __init__(self, ops: Any, heads: int, counts: list[int], first: list[int], size: int = 128) -> None:
        kv_heads = 8
        self.ops, self.heads, self.size, self.counts, self.first = ops, heads, size, counts, first
        self.cache = Cache([f + c for f, c in zip(first, counts, strict=True)], kv_heads, size)
        self.starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        self.qkv = rand(self.starts[-1], (heads + 2 * kv_heads) * size)
        self.places = ints(self.starts), ints(first)
        self.tiles = query_tiles(self.starts, first).to(DEVICE)
        self.out = nan(self.starts[-1], heads * size)

    def theirs(self, window: int = 0, new: bool = True) -> torch.Tensor:
        if new:
            self.ops.tiles(self.starts, self.first)
        parts = *self.cache.parts[:3], self.tiles, *self.places
        return self.ops.prefill_attention(self.qkv, *parts, self.heads, window, self.out)

    def ours(self, window: int = 0) -> torch.Tensor:
        parts = *self.cache.parts[:3], self.tiles, *self.places
        return prefill_attention(self.qkv, *parts, self.heads, window=window, out=self.out)

    def expected(self, window: int) -> torch.Tensor:
        q = self.qkv[:, : self.heads * self.size].unflatten(1, (self.heads, self.size))
        parts = *self.cache.parts[:3], *self.places
        return reference.paged_attention(q, *parts, window=window, dtype=torch.float64).flatten(1)

    def part(self, sequence: int, low: int, high: int) -> Prompts:
        """Some rows of one of the sequences, alone."""
        part = object.__new__(Prompts)
        part.__dict__.update(self.__dict__)
        begin = self.starts[sequence]
        part.counts, part.first = [high - low], [self.first[sequence] + low]
        part.cache = object.__new__(Cache)
        part.cache.__dict__.update(self.cache.__dict__)
        part.cache.tables = self.cache.tables[sequence : sequence + 1]
        part.starts = [0, high - low]
        part.qkv = self.qkv[begin + low : begin + high]
        part.places = ints(part.starts), ints(part.first)
        part.tiles = query_tiles(part.starts, part.first).to(DEVICE)
        part.out = nan(high - low, self.heads * self.size)
        return part


def company(name: str, many: Prompts, run: Callable[[Prompts], torch.Tensor]) -> None:
    """Whether a sequence's rows have the same bits alone and among others, and whole and in pieces."""
    whole = run(many).clone()
    alone = pieces = True
    for s, count in enumerate(many.counts):
        mine = whole[many.starts[s] : many.starts[s + 1]]
        alone &= torch.equal(run(many.part(s, 0, count)), mine)
        cuts = sorted({0, count // 3, count // 2 + 5 if count > 20 else 0, count})
        pieces &= all(torch.equal(run(many.part(s, a, b)), mine[a:b]) for a, b in itertools.pairwise(cuts))
    print(f"{name}: same bits alone {alone}, in pieces {pieces}", flush=True)
    report.setdefault("bits", {})[name] = {"alone": alone, "in pieces": pieces}
    if not alone:
        failed.append(f"{name}: a sequence's bits depend on its company")


def flashinfers() -> None:
    """FlashInfer's attention beside ours and PyTorch's: right, the same bits in any company, and how fast."""
    from syringa.engine.gpu.ops.flashinfer_ops import FlashInferOps, missing

    if (reason := missing(torch.cuda.get_device_capability())) is not None:
        print("FlashInfer: " + reason)
        return
    ops = FlashInferOps(required=True)
    counts, first = [257, 300, 1, 128, 900, *range(31, 500, 31)], [0, 100, 333, 64, 700, *range(0, 512, 32)]
    for heads, window in ((32, 0), (16, 0), (32, 100), (16, 1000)):
        many = Prompts(ops, heads, counts, first)
        check("flashinfer prefill", many.theirs(window), many.expected(window), 1e-2)
        same_bits("flashinfer prefill", lambda: many.theirs(window))
        company(f"flashinfer {heads}/8 window {window}", many, lambda p: p.theirs(window))
    for heads, batch, count, earlier in (
        (32, 4, 2000, 0), (32, 1, 8192, 0), (32, 14, 580, 0), (32, 2, 2048, 6144), (16, 4, 2000, 0), (16, 1, 8192, 0),
        (16, 14, 580, 0), (16, 2, 2048, 6144),
    ):  # fmt: skip
        prompts = Prompts(ops, heads, [count] * batch, [earlier] * batch)
        prompts.theirs()
        work = 4 * heads * prompts.size * batch * count * (earlier + (count + 1) / 2)
        us, ours = timed([lambda: prompts.theirs(new=False)]), timed([prompts.ours])
        other = f"ours {ours:.1f}"
        if not earlier:
            a, b, c = (rand(batch, h, count, prompts.size) for h in (heads, 8, 8))
            library = timed([lambda: F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)])
            other += f", SDPA {library:.1f}"
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            prompts.theirs()
        host = (time.perf_counter() - start) / 10 * 1e6
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            prompts.theirs(new=False)
        again = (time.perf_counter() - start) / 10 * 1e6
        torch.cuda.synchronize()
        row(
            f"flashinfer {heads}/8 {batch}x{count}+{earlier}",
            us,
            work,
            "TFLOP/s",
            other,
            f"host {host:.0f}, {again:.0f}",
        )
    for heads, batch, length in ((32, 64, 540), (32, 256, 540), (32, 256, 1024), (16, 64, 540), (16, 256, 540)):
        decode_beside(ops.library, heads, batch, length)
    many = Prompts(ops, 32, counts, first)
    company("ours 32/8", many, lambda p: p.ours())


def decode_beside(library: Any, heads: int, batch: int, length: int) -> None:
    """Ours also norms, turns and stores the new token; FlashInfer's finds it in the cache."""
    size, read = 128, 2 * batch * length * 8 * 128 * 2
    caches = [Cache([length] * batch, 8, size) for _ in range(min(4, copies(read)))]
    qkv, out = rand(batch, (heads + 16) * size), nan(batch, heads * size)
    q = qkv[:, : heads * size].unflatten(1, (heads, size)).contiguous()
    rotary, norms = turning(length, size), (rand(size, dtype=torch.float32), rand(size, dtype=torch.float32))
    news = [NewTokens(c.last_slots(), rotary, norms, 1e-6) for c in caches]
    pages = -(-length // BLOCK)
    wrappers = []
    for c in caches:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "HND", use_tensor_cores=True, backend="fa2"
        )
        starts = torch.arange(batch + 1, dtype=torch.int32) * pages
        last = torch.full((batch,), (length - 1) % BLOCK + 1, dtype=torch.int32)
        pages_of = c.tables[:, :pages].reshape(-1)
        wrapper.plan(starts, pages_of, last, heads, 8, size, BLOCK, q_data_type=BF16, kv_data_type=BF16)
        wrappers.append(wrapper)
    theirs = timed([lambda c=c, w=w: w.run(q, (c.keys, c.values)) for c, w in zip(caches, wrappers, strict=True)])
    ours = timed(
        [
            lambda c=c, new=new: decode_attention(qkv, *c.parts, heads, new=new, out=out)
            for c, new in zip(caches, news, strict=True)
        ]
    )
    row(f"flashinfer decode {heads}/8 {batch}x{length}", theirs, read, "GB/s", f"ours {ours:.1f}")
