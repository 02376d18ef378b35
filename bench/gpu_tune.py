"""Tuning by measurement, for `bench.gpu --tune`: tiles of decode attention, and which batch sizes profit from PDL."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_workloads import make_request
from syringa.engine.worker.core import EngineCore

Log = Callable[[str], None]


def timed(run: Callable[[], object], launches: int = 8) -> float:
    """Return microseconds per launch: the median of CUDA graph replays."""
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


def tune_decode_attention(log: Log) -> dict[int, Any]:
    """Return the best tiles for batches of mixed lengths, by number of rows."""
    from syringa.engine.gpu.kernels.decode_attention import choose_config, decode_attention

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

        default = choose_config(rows, kv_heads, size)
        times = {"default, unsorted": run(default, mixed), f"default {tuple(default)}": run(default)}
        configs = _decode_configs()
        for config in configs:
            try:
                times[str(tuple(config))] = run(config)
            except Exception as error:
                log(f"    {config}: {type(error).__name__}")
        best = min(configs, key=lambda c: times.get(str(tuple(c)), 1e9))
        found[rows] = best if times[str(tuple(best))] < 0.985 * times[f"default {tuple(default)}"] else default
        shown = sorted(times.items(), key=lambda item: item[1])
        log(f"  attention of {rows}: " + "; ".join(f"{k} {t:.0f} µs, {read / t / 1e6:.2f} TB/s" for k, t in shown[:5]))
        log("    " + "; ".join(f"{k} {t:.0f}" for k, t in shown[5:]))
    return found


def _decode_configs() -> list[Any]:
    from syringa.engine.gpu.kernels.decode_attention import DecodeConfig

    shapes = [(64, 4, 4, 128), (64, 4, 3, 128), (32, 4, 4, 128), (32, 4, 6, 128), (32, 2, 4, 168), (64, 8, 3, 64)]
    names = ("keys", "warps", "stages", "registers")
    tiles = [dict(zip(names, shape, strict=True)) for shape in shapes]
    return [DecodeConfig(splits=splits, **tile) for splits in (1, 2) for tile in tiles]


def compare_overlap(core: EngineCore, batch: int, log: Log) -> tuple[float, float]:
    """Return the milliseconds of a decode step with and without programmatic dependent launch, measured alternately."""
    assert core.runner
    runner: Any = core.runner
    ops = runner.model.ops
    overlap_rows = ops.overlap_rows
    rng = random.Random(batch)
    for i in range(batch):
        core.submit(make_request(rng, i, 400, 400))
    while len(core.scheduler.waiting) or any(s.needed > 1 for s in core.scheduler.running):
        core.step()
    graphs = {}
    for pdl in (True, False):
        ops.overlap_rows = 1 << 20 if pdl else 0
        runner.recapture_cuda_graph(batch)
        graphs[pdl] = runner.cuda_graphs.graphs[batch]
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(6):
        for pdl in (True, False):
            runner.cuda_graphs.graphs[batch] = graphs[pdl]
            core.step()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(12):
                core.step()
            torch.cuda.synchronize()
            times[pdl].append((time.perf_counter() - start) / 12 * 1e3)
    for i in range(batch):
        core.abort(str(i))
    while core.busy:
        core.step()
    ops.overlap_rows = overlap_rows
    runner.cuda_graphs.graphs[batch] = graphs[batch <= overlap_rows]
    a, b = (statistics.median(times[pdl]) for pdl in (True, False))
    log(f"  step of {batch}: {a:.3f} ms with PDL, {b:.3f} ms without")
    return a, b
