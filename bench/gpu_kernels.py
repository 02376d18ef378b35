"""Checks and times the kernels of `syringa.engine.gpu` on a CUDA machine, with torch and Triton alone.

    python3 bench/gpu_kernels.py [--only linear,decode,…] [--quick]

Every kernel is first compared with a reference in float32 or float64 on fresh random inputs, into poisoned outputs, and
run again to see that the bits stay. Times are medians of CUDA graph replays, per launch, over inputs that together
exceed the L2 cache, so they hold what a launch costs inside a graph. Configurations are tried from short lists; the
best of each is what the kernels' `choose` should give. JSON goes to $OUT/gpu_kernels.json where $OUT is set.
"""

# ruff: noqa: B023
from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from syringa.engine.gpu import reference
from syringa.engine.gpu.decode import DecodeConfig, NewTokens, decode_attention
from syringa.engine.gpu.elementwise import add_rms_norm, rms_norm, silu_mul
from syringa.engine.gpu.gemv import GemvConfig
from syringa.engine.gpu.linear import Config, linear
from syringa.engine.gpu.prefill import PrefillConfig, prefill_attention, query_tiles
from syringa.engine.gpu.rotary import rotate_and_store
from syringa.engine.gpu.sampling import sample
from syringa.engine.gpu.skinny import SkinnyConfig

DEVICE, BF16 = "cuda", torch.bfloat16
BEYOND_L2 = 200 << 20
VOCAB, BLOCK = 151_936, 16
Launch = Callable[[], Any]


class Model(NamedTuple):
    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    size: int
    intermediate: int


MODELS = [Model("8B", 4096, 36, 32, 8, 128, 12288), Model("0.6B", 1024, 28, 16, 8, 128, 3072)]

# By inputs: all of a round's warps should lie along them, so that no input is loaded twice.
GEMV = {
    4096: [(2, 2048, 8), (4, 2048, 8), (2, 4096, 8), (2, 4096, 16), (1, 4096, 8), (1, 2048, 4), (8, 512, 4, 4)],
    12288: [(1, 2048, 4), (1, 4096, 8), (1, 2048, 8), (2, 2048, 8), (2, 4096, 16), (1, 4096, 4), (8, 512, 4, 4)],
    1024: [(2, 1024, 4), (4, 1024, 4), (4, 1024, 2), (8, 1024, 4), (2, 1024, 2), (4, 512, 2), (4, 256, 4)],
    2048: [(1, 2048, 4), (2, 2048, 4), (2, 2048, 8), (1, 1024, 4), (2, 1024, 4)],
    3072: [(1, 1024, 4), (2, 1024, 4), (1, 2048, 4), (1, 4096, 8)],
}
SKINNY = {
    16: [
        SkinnyConfig(16, 256, 2, 4),
        SkinnyConfig(16, 256, 2, 6),
        SkinnyConfig(16, 512, 2, 3),
        SkinnyConfig(32, 256, 2, 4),
        SkinnyConfig(32, 256, 4, 4),
        SkinnyConfig(64, 128, 4, 4),
        SkinnyConfig(64, 128, 4, 6, 2),
        SkinnyConfig(64, 128, 4, 4, 4),
        SkinnyConfig(128, 64, 4, 5),
    ],
    64: [
        SkinnyConfig(64, 128, 4, 4),
        SkinnyConfig(64, 128, 4, 4, 2),
        SkinnyConfig(64, 128, 4, 4, 4),
        SkinnyConfig(64, 256, 4, 3),
        SkinnyConfig(128, 64, 4, 5),
        SkinnyConfig(128, 64, 4, 6, 2),
        SkinnyConfig(128, 64, 4, 6, 3),
        SkinnyConfig(128, 128, 8, 3, 2),
        SkinnyConfig(128, 128, 8, 4, 4),
    ],
}
DECODE_SHAPES = [(32, 1, 16000), (32, 1, 384), (32, 64, 384), (32, 256, 1024), (16, 1, 384), (16, 64, 384)]
DECODE = [(1, 64, 4, 4), (1, 64, 4, 5), (1, 32, 4, 4), (1, 32, 4, 5), (1, 128, 8, 3)]
PREFILL = [
    PrefillConfig(128, 32, 4, 4),
    PrefillConfig(128, 32, 4, 5),
    PrefillConfig(128, 64, 4, 3),
    PrefillConfig(128, 64, 4, 4),
    PrefillConfig(128, 128, 8, 3),
]

report: dict[str, Any] = {"checks": {}, "rows": [], "tuned": {}}
lines: list[str] = []
failed: list[str] = []
winners: dict[tuple, Any] = {}  # configurations by what they are best for


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).mul_(scale)


def ints(values: Iterable[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=DEVICE)


def nan(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def timed(launches: list[Launch], milliseconds: float = 12.0) -> float:
    """Microseconds per launch: the median of a graph's replays."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times: list[float] = []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    while len(times) < 4 or (sum(times) < milliseconds and len(times) < 50):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times) / len(launches)


def copies(size: int) -> int:
    return max(1, min(64, -(-BEYOND_L2 // size)))


def check(name: str, out: torch.Tensor, expected: torch.Tensor, limit: float = 6e-3) -> None:
    a, b = out.double(), expected.double()
    error = float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")
    report["checks"][name] = max(error, report["checks"].get(name, 0.0))
    if not error < limit:
        failed.append(f"{name}: relative error {error:.2e}, allowed {limit:.0e}")


def same_bits(name: str, launch: Callable[[], torch.Tensor], times: int = 20) -> None:
    first = launch().clone()
    if not all(torch.equal(first, launch()) for _ in range(times)):
        failed.append(f"{name}: not the same bits every time")


def row(name: str, us: float, amount: float, unit: str, other: str = "", config: object = "") -> None:
    """`amount` is bytes or operations; the share is of what this machine was just seen to do."""
    rate = amount / us / (1e3 if unit == "GB/s" else 1e6)
    share = rate / ceilings[unit]
    report["rows"].append({"name": name, "us": us, "rate": rate, "unit": unit, "share": share, "other": other})
    settings = ",".join(map(str, config)) if isinstance(config, tuple) else str(config)
    lines.append(f"{name:<34}{us:9.1f}{rate:8.0f} {unit:<7} {share:4.0%}  {other:<22} {settings}")
    print(lines[-1], flush=True)


def best(launches: Callable[[Any], list[Launch]], configs: Iterable[Any], name: str) -> tuple[Any, float]:
    results = {}
    for config in configs:
        try:
            results[config] = timed(launches(config), 6.0)
        except triton.runtime.errors.OutOfResources:
            continue
    report["tuned"][name] = {str(tuple(c)): round(t, 2) for c, t in sorted(results.items(), key=lambda r: r[1])}
    config = min(results, key=results.__getitem__)
    return config, results[config]


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at)))


def measure_ceilings() -> dict[str, float]:
    x = rand(1 << 30, dtype=BF16)
    y = torch.empty_like(x)
    # Not from a graph, whose copies go another way and take half as long again.
    copied = 2 * x.nbytes / triton.testing.do_bench(lambda: y.copy_(x), return_mode="median") / 1e6
    words = x.view(torch.int32)
    sums = torch.empty(len(words) // 8192, dtype=torch.int32, device=DEVICE)
    read = x.nbytes / timed([lambda: _read_kernel[(len(sums),)](words, sums, BLOCK=8192, num_warps=8)]) / 1e3
    a, b = rand(8192, 8192), rand(8192, 8192)
    product = 2 * 8192**3 / timed([lambda: a @ b]) / 1e6
    empty = torch.zeros(1, device=DEVICE)
    gap = timed([lambda: empty.add_(1)] * 200)
    print(f"copy {copied:.0f} GB/s, read {read:.0f} GB/s, matmul {product:.0f} TFLOP/s, launch in a graph {gap:.2f} µs")
    report["ceilings"] = {"copy": copied, "read": read, "matmul": product, "launch_us": gap}
    return {"GB/s": read, "TFLOP/s": product}


def elementwise() -> None:
    for hidden, intermediate in ((4096, 12288), (1024, 3072)):
        weight = rand(hidden, dtype=torch.float32)
        x, residual, gate_up = rand(7, hidden), rand(7, hidden), rand(7, 2 * intermediate)
        check("rms_norm", rms_norm(x, weight, 1e-6, nan(7, hidden)), reference.rms_norm(x.double(), weight, 1e-6))
        kept = residual.double()
        expected = reference.add_rms_norm(x.double(), kept, weight, 1e-6, torch.float64)
        check("add_rms_norm", add_rms_norm(x, residual, weight, 1e-6, nan(7, hidden)), expected)
        check("add_rms_norm residual", residual, kept)
        check("silu_mul", silu_mul(gate_up, nan(7, intermediate)), reference.silu_mul(gate_up.double()))
        for rows in (1, 64, 4096):
            n = min(16, copies(rows * hidden * 4))
            sets = [(rand(rows, hidden), rand(rows, hidden), rand(rows, 2 * intermediate)) for _ in range(n)]
            outs = torch.empty(rows, hidden, device=DEVICE, dtype=BF16)
            wide = torch.empty(rows, intermediate, device=DEVICE, dtype=BF16)
            us = timed([lambda s=s: add_rms_norm(s[0], s[1], weight, 1e-6, outs) for s in sets])
            other = timed([lambda s=s: F.rms_norm(s[0] + s[1], (hidden,), weight.to(BF16)) for s in sets])
            row(f"add_rms_norm {rows}x{hidden}", us, rows * hidden * 8, "GB/s", f"torch {other:.1f}")
            us = timed([lambda s=s: silu_mul(s[2], wide) for s in sets])
            row(f"silu_mul {rows}x{intermediate}", us, rows * intermediate * 6, "GB/s")


def products(model: Model) -> list[tuple[str, int, int, dict[str, Any]]]:
    """Name, outputs, inputs and what is fused, as a decode step has them."""
    m = model
    qkv = (m.heads + 2 * m.kv_heads) * m.size
    return [
        ("qkv", qkv, m.hidden, {"gain": True}),
        ("o", m.hidden, m.heads * m.size, {"residual": True}),
        ("gate_up", m.intermediate, m.hidden, {"gain": True, "gated": True}),
        ("down", m.hidden, m.intermediate, {"residual": True}),
        ("head", VOCAB, m.hidden, {"gain": True, "out_dtype": torch.float32}),
    ]


def options_for(rows: int, outputs: int, inputs: int, fused: dict[str, Any], config: Config | None) -> dict[str, Any]:
    options: dict[str, Any] = {"eps": 1e-6, "config": config, "gated": fused.get("gated", False)}
    options["out"] = nan(rows, outputs, dtype=fused.get("out_dtype", BF16))
    if fused.get("gain") and not isinstance(config, SkinnyConfig):
        options["gain"] = rand(inputs)
    if fused.get("residual"):
        options["residual"] = rand(rows, outputs)
    return options


def linears(quick: bool) -> None:
    for model in MODELS:
        for name, outputs, inputs, fused in products(model):
            height = outputs * (2 if fused.get("gated") else 1)
            n = copies(height * inputs * 2)
            weights = [rand(height, inputs, scale=inputs**-0.5) for _ in range(n)]
            for rows in (1, 16, 64):
                x = rand(rows, inputs)
                tried: list[Any] = [GemvConfig(*c) for c in GEMV[inputs]] if rows == 1 else SKINNY[rows]
                tried = tried[-2:] if quick else tried[4:] if name == "head" and rows > 1 else tried
                for config in tried:
                    options = options_for(rows, outputs, inputs, fused, config)
                    kept = {k: v for k, v in options.items() if k not in ("config", "out")}
                    if name != "head" or config is tried[0]:
                        expected = reference.linear(x, weights[0], out_dtype=torch.float32, **kept)
                        try:
                            out = linear(x, weights[0], pdl=True, **options)
                        except triton.runtime.errors.OutOfResources:
                            continue
                        check(f"linear {type(config).__name__} x{rows}", out, expected)

                def launches(config: Config, x: torch.Tensor = x, ws: list[torch.Tensor] = weights) -> list[Launch]:
                    options = options_for(len(x), outputs, inputs, fused, config)
                    return [lambda w=w: linear(x, w, pdl=True, **options) for w in ws]

                config, us = best(launches, tried, f"linear {model.name} {name} x{rows}")
                winners[rows, outputs, inputs] = config
                options = options_for(rows, outputs, inputs, fused, config)
                same_bits(f"linear {config}", lambda: linear(x, weights[0], pdl=True, **options), 5)
                apart = timed([lambda w=w: linear(x, w, **options) for w in weights])
                library = timed([lambda w=w: F.linear(x, w) for w in weights])
                size = height * inputs * 2
                row(
                    f"{model.name} {name} {rows}x{height}x{inputs}",
                    us,
                    size,
                    "GB/s",
                    f"{apart:.1f}, cuBLAS {library:.1f}",
                    config,
                )


class Cache:
    """A paged cache of random numbers whose blocks lie in no order."""

    def __init__(self, lengths: list[int], kv_heads: int, size: int) -> None:
        counts = [-(-n // BLOCK) for n in lengths]
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        order = torch.randperm(sum(counts), dtype=torch.int32)
        for s, part in enumerate(order.split(counts)):
            self.tables[s, : len(part)] = part
        self.tables = self.tables.to(DEVICE)
        self.keys, self.values = (rand(sum(counts), kv_heads, BLOCK, size) for _ in range(2))
        self.lengths = ints(lengths)

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values, self.tables, self.lengths

    def last_slots(self) -> torch.Tensor:
        at = (self.lengths - 1).long()
        return self.tables.gather(1, (at // BLOCK)[:, None])[:, 0].long() * BLOCK + at % BLOCK


def turning(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 1e6 ** (-torch.arange(0, size, 2, device=DEVICE) / size)
    angles = torch.arange(length, device=DEVICE)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotaries() -> None:
    heads, kv_heads, size = 32, 8, 128
    rotary, norms = turning(8192, size), (rand(size, dtype=torch.float32), rand(size, dtype=torch.float32))
    for rows in (1, 64, 4096):
        qkv = rand(rows, (heads + 2 * kv_heads) * size)
        keys, values = (nan(rows // BLOCK + 1, kv_heads, BLOCK, size) for _ in range(2))
        positions, slots = torch.arange(rows, device=DEVICE, dtype=torch.int32), torch.randperm(rows, device=DEVICE)
        expected = [t.double() for t in (qkv, keys, values)]
        arguments = positions, slots, rotary, norms, 1e-6
        reference.rotate_and_store(expected[0], *arguments, expected[1], expected[2], heads, torch.float64)
        work = qkv.clone()
        rotate_and_store(work, *arguments, keys, values, heads)
        check("rotate_and_store q", work, expected[0])
        if not torch.equal(keys.isnan(), expected[1].isnan()):
            failed.append("rotate_and_store: other slots were written")
        check("rotate_and_store k", keys.nan_to_num(), expected[1].nan_to_num())
        check("rotate_and_store v", values.nan_to_num(), expected[2].nan_to_num())
        sets = [qkv.clone() for _ in range(min(16, copies(qkv.nbytes)))]
        us = timed([lambda s=s: rotate_and_store(s, *arguments, keys, values, heads) for s in sets])
        row(f"rotate_and_store {rows}", us, 2 * qkv.nbytes, "GB/s")


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
    from syringa.engine.gpu.flashinfer_ops import FlashInferOps, missing

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


def samples() -> None:
    for batch in (1, 64, 256):
        logits = rand(batch, VOCAB, scale=3.0, dtype=torch.float32)
        index = torch.arange(batch, device=DEVICE)
        keys = index * 7919 - 50, (index % 3).int(), (index * 5).int()
        hot = torch.full((batch,), 0.6, device=DEVICE)
        kinds = [("plain", hot, None), ("greedy", hot * 0, None)]
        for name, k, p, m in (
            ("top-k 20 top-p .95", 20, 0.95, 0.0),
            ("top-p .9", 0, 0.9, 0.0),
            ("min-p .05", 0, 1.0, 0.05),
        ):
            rules = ints([k] * batch), torch.full((batch,), p, dtype=torch.float64, device=DEVICE), hot * 0 + m
            kinds.append((name, hot, rules))
        for name, temperatures, rules in kinds:
            out = torch.full((batch,), -7, device=DEVICE)
            tokens = sample(logits, temperatures, *keys, *(rules or ()), out=out)
            expected = reference.sample(logits, temperatures, *keys, *(rules or ()))
            wrong = int((tokens != expected).sum())
            report["checks"][f"sample {name} x{batch} differ"] = wrong
            if wrong > batch // 64:  # noise may fall on a border; more than that is a fault
                failed.append(f"sample {name}: {wrong} of {batch} tokens differ from the reference")
            us = timed([lambda t=temperatures, r=rules: sample(logits, t, *keys, *(r or ()), out=out)])
            row(f"sample {name} {batch}", us, batch * VOCAB * 4, "GB/s")


def steps() -> None:
    """A whole decode step on random weights, by what was found best: what the kernels add up to."""
    for model in MODELS:
        m = model
        shapes = products(m)
        layers = [
            {n: rand(o * (2 if f.get("gated") else 1), i, scale=i**-0.5) for n, o, i, f in shapes[:-1]}
            for _ in range(m.layers)
        ]
        head = rand(VOCAB, m.hidden, scale=m.hidden**-0.5)
        ones, norms = torch.ones(m.hidden, device=DEVICE, dtype=BF16), (torch.ones(m.size, device=DEVICE),) * 2
        read = 2 * (sum(w.numel() for layer in layers for w in layer.values()) + head.numel())
        for batch, length in ((1, 384), (64, 384)):
            caches = [Cache([length] * batch, m.kv_heads, m.size) for _ in range(m.layers)]
            rotary = turning(length, m.size)
            news = [NewTokens(c.last_slots(), rotary, norms, 1e-6) for c in caches]
            begin, x = rand(batch, m.hidden), rand(batch, m.hidden)
            index = torch.arange(batch, device=DEVICE)
            hot = torch.full((batch,), 0.6, device=DEVICE)
            logits = nan(batch, VOCAB, dtype=torch.float32)

            def product(x: torch.Tensor, weight: torch.Tensor, **rest: Any) -> torch.Tensor:
                outputs = len(weight) // 2 if rest.get("gated") else len(weight)
                return linear(x, weight, config=winners.get((batch, outputs, weight.shape[1])), eps=1e-6, **rest)

            def step(pdl: bool) -> torch.Tensor:
                x.copy_(begin)
                tiles = winners.get((m.heads, batch))
                for layer, cache, new in zip(layers, caches, news, strict=True):
                    qkv = product(x, layer["qkv"], gain=ones, pdl=pdl)
                    mixed = decode_attention(qkv, *cache.parts, m.heads, new=new, config=tiles, pdl=pdl)
                    product(mixed, layer["o"], residual=x, out=x, pdl=pdl)
                    wide = product(x, layer["gate_up"], gain=ones, gated=True, pdl=pdl)
                    product(wide, layer["down"], residual=x, out=x, pdl=pdl)
                product(x, head, gain=ones, out=logits, pdl=pdl)
                return sample(logits, hot, index, index, index, pdl=pdl)

            def library_step() -> torch.Tensor:
                x.copy_(begin)
                normed = rms_norm(x, ones, 1e-6)
                for layer, cache, new in zip(layers, caches, news, strict=True):
                    mixed = decode_attention(
                        F.linear(normed, layer["qkv"]),
                        *cache.parts,
                        m.heads,
                        new=new,
                        config=winners.get((m.heads, batch)),
                    )
                    normed = add_rms_norm(F.linear(mixed, layer["o"]), x, ones, 1e-6)
                    wide = silu_mul(F.linear(normed, layer["gate_up"]))
                    normed = add_rms_norm(F.linear(wide, layer["down"]), x, ones, 1e-6)
                return sample(F.linear(normed, head).float(), hot, index, index, index)

            kept = []
            size = read + 2 * batch * length * m.kv_heads * m.size * 2 * m.layers
            ways = {"": lambda: step(False), " pdl": lambda: step(True), " cuBLAS": library_step}
            for name, way in ways.items():
                us = timed([way], 60.0)
                kept.append(logits.clone())
                row(f"step {m.name} {batch}x{length}{name}", us, size, "GB/s", f"{batch / us * 1e6:,.0f} tok/s")
            if not (bool(kept[0].isfinite().all()) and torch.equal(kept[0], kept[1])):
                failed.append(f"step {m.name}: overlapping launches changed the logits")


def main() -> int:
    global ceilings
    parts: dict[str, Launch] = {
        "elementwise": elementwise,
        "rotary": rotaries,
        "decode": decodes,
        "sample": samples,
        "linear": lambda: linears(options.quick),
        "step": steps,
        "prefill": prefills,
        "flashinfer": flashinfers,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="parts, with commas: " + ", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels' logic is tested by tests/engine/gpu under Triton's interpreter")
        return 2
    torch.manual_seed(time.time_ns() % 2**31)
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    ceilings = measure_ceilings()
    for name, part in parts.items():
        if not options.only or name in options.only.split(","):
            begin = time.perf_counter()
            try:
                part()
            except Exception as error:  # the other parts' figures are worth having
                failed.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
            report["failed"] = failed
            if out := os.environ.get("OUT"):
                Path(out, "gpu_kernels.json").write_text(json.dumps(report, indent=1))
    print("\nlargest relative errors:", {k: f"{v:.1e}" for k, v in report["checks"].items()})
    print(f"{'kernel':<34}{'µs':>9}{'rate':>8}         share  apart, instead         config")
    print("\n".join(lines))
    print("FAILED:\n" + "\n".join(failed) if failed else "all checks passed")
    return 1 if failed else 0


ceilings: dict[str, float] = {}

if __name__ == "__main__":
    sys.exit(main())
