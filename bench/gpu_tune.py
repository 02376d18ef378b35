"""Choices that only a measurement can make, for `bench.gpu --tune`: attention's tiles, and which steps overlap."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu import make_request
from syringa.engine.worker.core import EngineCore

Say = Callable[[str], None]


def timed(run: Callable[[], object], launches: int = 8) -> float:
    """Microseconds, from a graph's replays."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(launches):
            run()
    graph.replay()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / launches * 1e3)
    return statistics.median(times)


def attention(say: Say) -> dict[int, Any]:
    """The best tiles for batches of mixed lengths, by rows."""
    from syringa.engine.gpu.kernels.decode_attention import choose, decode_attention

    heads, kv_heads, size = 32, 8, 128
    found: dict[int, Any] = {}
    for rows in (64, 128, 256):
        rng = random.Random(rows)
        lengths = sorted((rng.randint(200, 1600) for _ in range(rows)), reverse=True)
        width = 112
        blocks = rows * width
        keys, values = (torch.randn(blocks, kv_heads, 16, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        tables = torch.randperm(blocks, device="cuda").int().view(rows, width)
        q = torch.randn(rows, (heads + 2 * kv_heads) * size, device="cuda", dtype=torch.bfloat16)
        ordered = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        mixed = ordered[torch.randperm(rows, device="cuda")]
        read = sum(lengths) * 2 * kv_heads * size * 2

        def run(
            config: Any, at: torch.Tensor = ordered, q: Any = q, k: Any = keys, v: Any = values, t: Any = tables
        ) -> float:
            return timed(lambda: decode_attention(q, k, v, t, at, heads, config=config))

        own = choose(rows, kv_heads, size)
        times = {"own, in no order": run(own, mixed), f"own {tuple(own)}": run(own)}
        tried = _tiles()
        for config in tried:
            try:
                times[str(tuple(config))] = run(config)
            except Exception as error:
                say(f"    {config}: {type(error).__name__}")
        best = min(tried, key=lambda c: times.get(str(tuple(c)), 1e9))
        found[rows] = best if times[str(tuple(best))] < 0.985 * times[f"own {tuple(own)}"] else own
        shown = sorted(times.items(), key=lambda item: item[1])
        say(f"  attention of {rows}: " + "; ".join(f"{k} {t:.0f} µs, {read / t / 1e6:.2f} TB/s" for k, t in shown[:5]))
        say("    " + "; ".join(f"{k} {t:.0f}" for k, t in shown[5:]))
    return found


def _tiles() -> list[Any]:
    from syringa.engine.gpu.kernels.decode_attention import DecodeConfig

    shapes = [(64, 4, 4, 128), (64, 4, 3, 128), (32, 4, 4, 128), (32, 4, 6, 128), (32, 2, 4, 168), (64, 8, 3, 64)]
    names = ("keys", "warps", "stages", "registers")
    tiles = [dict(zip(names, shape, strict=True)) for shape in shapes]
    return [DecodeConfig(splits=splits, **tile) for splits in (1, 2) for tile in tiles]


def overlap(core: EngineCore, batch: int, say: Say) -> tuple[float, float]:
    """Milliseconds of a step whose kernels overlap and of one whose do not, in turns."""
    assert core.ahead
    runner: Any = core.ahead.runner
    ops = runner.model.ops
    kept = ops.overlap_rows
    rng = random.Random(batch)
    for i in range(batch):
        core.submit(make_request(rng, i, 400, 400))
    while len(core.scheduler.waiting) or any(s.needed > 1 for s in core.scheduler.running):
        core.step()
    graphs = {}
    for way in (True, False):
        ops.overlap_rows = 1 << 20 if way else 0
        runner.record(batch)
        graphs[way] = runner.graphs._graphs[batch]
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(6):
        for way in (True, False):
            runner.graphs._graphs[batch] = graphs[way]
            core.step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(12):
                core.step()
            torch.cuda.synchronize()
            times[way].append((time.perf_counter() - start) / 12 * 1e3)
    for i in range(batch):
        core.abort(str(i))
    while core.busy:
        core.step()
    ops.overlap_rows = kept
    runner.graphs._graphs[batch] = graphs[batch <= kept]
    a, b = (statistics.median(times[way]) for way in (True, False))
    say(f"  step of {batch}: {a:.3f} ms overlapping, {b:.3f} ms not")
    return a, b
