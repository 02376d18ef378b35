"""Measure the engine on a GPU and compare it with vLLM: `python -m bench.gpu [--model qwen3-0.6b,qwen3-8b] [--quick]`.

Needs only torch, Triton, NumPy and msgspec. Models have real shapes and random weights, created on the GPU. Each
workload runs twice through the engine core that also serves requests, from the first arrival to the last token:
temperature 0.6, end of text ignored, prefix caching off. Copy and read bandwidth are measured in the same run. Tables
and JSON go to $OUT, or to bench/results.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_models import MODELS, build_model
from bench.gpu_workloads import MAX_RUNNING, STEP_TOKENS, log, make_request, run_requests, workload
from syringa.engine.gpu.decoder import GpuExperts
from syringa.engine.loading.gpu_model import with_cache_dtype
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore

# vLLM 0.26.0 on an H200, best of several runs: tokens per second, and seconds until ready.
VLLM: dict[str, dict[str, int]] = {
    "qwen3-0.6b": {"decode_b1": 395, "decode_b64": 18_911, "nano256": 22_069, "prefill": 368_404, "ready": 81},
    "qwen3-8b": {"decode_b1": 193, "decode_b64": 9_197, "nano256": 9_626, "prefill": 43_089, "ready": 67},
    "qwen3-8b fp8": {"decode_b1": 268, "decode_b64": 11_913, "nano256": 11_339, "prefill": 64_388},
    "qwen3-30b-a3b": {"decode_b1": 236, "decode_b64": 3_470, "nano256": 6_030, "prefill": 68_443, "ready": 108},
}
TARGETS = {"decode_b1": 1.0, "decode_b64": 1.0, "nano256": 1.0, "prefill": 0.9}


def measure_bandwidth() -> dict[str, float]:
    """Return GB/s of a copy on the device (bytes read and written) and of a read."""
    x = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    y = torch.empty_like(x)
    words = x.view(torch.int64)

    def timed(run: Callable[[], object]) -> float:
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times[2:])

    copied = 2 * x.nbytes / timed(lambda: y.copy_(x)) / 1e9
    read = x.nbytes / timed(words.max) / 1e9
    return {"copy": copied, "read": read}


# `gap`: the device is idle; `apart`: a step_time step without PDL; `step`: a step_time step as served.
PARTS = ("attention", "products", "rest", "sampling", "gap", "apart", "step")
ATTENTION = ("_decode_kernel", "_prefill_kernel", "_rotary_kernel")
PRODUCTS = ("_gemv_kernel", "_skinny_kernel", "gemm", "nvjet", "cutlass", "splitK", "cublas")
SAMPLING = ("_block_stats_kernel", "_sample_kernel")


def profile_decode_step(core: EngineCore, batch: int, context: int = 512) -> dict[str, float]:
    """Return the microseconds of a decode step: by kind of kernel from a profile, in all from the clock without it."""
    rng = random.Random(batch)
    for i in range(batch):
        core.submit(make_request(rng, i, context, 400, vocabulary=core.loaded.info.vocab_size))
    while core.scheduler.waiting or any(s.needed > 1 for s in core.scheduler.running):
        core.step()
    for _ in range(4):
        core.step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(24):
        core.step()
    step_time = (time.perf_counter() - start) / 24 * 1e6
    from torch.profiler import ProfilerActivity, profile

    steps = 6
    # With PDL, a kernel's time includes waiting for the previous one: profile without.
    assert core.runner
    runner: Any = core.runner
    overlap_rows, runner.model.ops.overlap_rows = runner.model.ops.overlap_rows, 0
    runner.recapture_cuda_graph(batch)
    core.step()
    start = time.perf_counter()
    for _ in range(12):
        core.step()
    apart = (time.perf_counter() - start) / 12 * 1e6
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            core.step()
        torch.cuda.synchronize()
    parts = {"attention": 0.0, "products": 0.0, "sampling": 0.0, "rest": 0.0}
    names: dict[str, float] = {}
    for event in found.key_averages():
        microseconds = event.self_device_time_total / steps
        kind = "rest"
        if any(word in event.key for word in SAMPLING):
            kind = "sampling"
        elif any(word in event.key for word in ATTENTION):
            kind = "attention"
        elif any(word in event.key for word in PRODUCTS):
            kind = "products"
        parts[kind] += microseconds
        names[event.key[:60]] = microseconds
    for i in range(batch):
        core.abort(str(i))
    while core.busy:
        core.step()
    runner.model.ops.overlap_rows = overlap_rows
    runner.recapture_cuda_graph(batch)
    parts["gap"] = max(0.0, apart - sum(parts.values()))
    parts["apart"] = apart
    parts["step"] = step_time
    top = sorted(names.items(), key=lambda item: -item[1])[:8]
    log(f"  batch {batch}: " + ", ".join(f"{name} {us:.0f} µs" for name, us in parts.items()))
    log("    " + "; ".join(f"{name} {us:.0f}" for name, us in top))
    return parts


def profile_host(core: EngineCore, batch: int) -> None:
    """Profile the host's work in a step and log the most expensive functions."""
    import cProfile
    import pstats

    rng = random.Random(batch)
    for i in range(batch):
        core.submit(make_request(rng, i, 128, 60, vocabulary=core.loaded.info.vocab_size))
    for _ in range(12):
        core.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(20):
        core.step()
    profiler.disable()
    found = pstats.Stats(profiler)
    rows = sorted(found.stats.items(), key=lambda item: -item[1][2])[:14]  # type: ignore[attr-defined]
    for (file, line, name), (calls, _, own, total, _) in rows:
        where = f"{calls // 20:6d}× {Path(file).name}:{line} {name}"
        log(f"    {own / 20 * 1e6:8.0f} µs own {total / 20 * 1e6:8.0f} total {where}")
    while core.busy:
        core.step()


def log_compilations() -> None:
    """Log kernels that are compiled, or read from Triton's cache, from now on: the server should have all it needs."""
    from triton import knobs

    def compiled(*, repr: str, **_: Any) -> None:
        log(f"    compiled {repr[:400]}")

    knobs.runtime.jit_post_compile_hook = compiled  # type: ignore[assignment]


def measure(name: str, options: argparse.Namespace, dtype: str, bandwidths: dict[str, float]) -> dict[str, Any]:
    device = torch.device("cuda")
    log(f"{name} {dtype}: creating weights")
    loaded = with_cache_dtype(
        build_model(name, device, dtype, attention=options.attention), options.kv_cache_dtype, options.attention
    )
    if options.tune:
        ops: Any = loaded.gpu.decoder.ops if loaded.gpu else None
        tiles = options.tiles
        ops.decode_config = lambda rows, _: next((tiles[n] for n in (64, 128, 256) if 32 < rows <= n), None)
    torch.cuda.synchronize()
    start = time.perf_counter()
    log("weights created; profiling memory and capturing CUDA graphs")
    limits = SchedulerLimits(step_tokens=options.step_tokens, max_running=MAX_RUNNING, max_queue=4096)
    core = EngineCore(loaded, limits, prefix_caching=False)
    assert loaded.gpu
    vocabulary = loaded.info.vocab_size
    run_requests(core, [make_request(random.Random(1), 0, 20, 2, vocabulary=vocabulary)])
    ready = time.perf_counter() - start
    capture_seconds = core.runner.cuda_graphs.capture_seconds if core.runner else 0.0  # type: ignore[attr-defined]
    log(f"first token after {ready:.1f} s ({capture_seconds:.1f} s for CUDA graphs), {core.pool.total:,} blocks")
    result: dict[str, Any] = {"ready": ready, "graphs": capture_seconds, "workloads": {}, "parts": {}}
    log_compilations()
    for work in options.workloads.split(","):
        speeds = []
        for _ in range(1 if options.quick else options.runs):
            requests = workload(work, options.quick, vocabulary)
            seconds, tokens, steps = run_requests(core, requests)
            if work == "prefill":
                tokens = sum(len(request.prompt) for request in requests)
            speeds.append(tokens / seconds)
            each = f"{steps} steps, {1e3 * seconds / steps:.2f} ms each"
            log(f"  {work}: {speeds[-1]:,.0f} tok/s, {seconds:.2f} s, {each}")
        result["workloads"][work] = speeds
    if not options.no_parts:
        for batch in (1, 64, 256):
            try:
                result["parts"][batch] = profile_decode_step(core, batch)
            except Exception as error:  # keep the other figures
                log(f"  no profile of batch {batch}: {error!r}")
        if options.host:
            profile_host(core, 256)
    if options.tune:
        from bench import gpu_tune

        result["overlap"] = {batch: gpu_tune.compare_overlap(core, batch, log) for batch in (8, 32, 64, 128)}
    c = loaded.gpu.decoder.config
    read = sum(_bytes(layer) for layer in loaded.gpu.decoder.layers) + loaded.gpu.decoder.head.nbytes
    bandwidth_limit = bandwidths["copy"] * 1e9 / read
    if "decode_b1" in result["workloads"]:
        share = max(result["workloads"]["decode_b1"]) / bandwidth_limit
        result["wall"] = {"bytes": read, "tokens_per_second": bandwidth_limit, "share": share}
        log(
            f"  a token reads {read / 1e9:.2f} GB, at most {bandwidth_limit:,.0f} tok/s at batch 1; "
            f"decode_b1 reaches {share:.0%}"
        )
    result["layers"] = c.layers
    core.close()
    del core, loaded
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    return result


def _bytes(layer: Any) -> int:
    mlp = layer.mlp
    parts = [layer.qkv, layer.out, *([] if layer.gates is None else [layer.gates])]
    experts = 0
    if isinstance(mlp, GpuExperts):  # what one token reads
        experts = int(mlp.per_token / mlp.gate_up.shape[0] * (mlp.gate_up.nbytes + mlp.down.nbytes))
        mlp = mlp.shared_mlp
    parts += [] if mlp is None else [mlp.gate_up, mlp.down]
    return experts + sum(part.weight.nbytes for part in parts)


def render_table(results: dict[str, Any], bandwidths: dict[str, float]) -> str:
    """Render the results as Markdown."""
    lines = [
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; a copy on the device moved "
        f"{bandwidths['copy'] / 1e3:.2f} TB/s, a read {bandwidths['read'] / 1e3:.2f} TB/s.",
        "",
        "| model | workload | tok/s, run by run | vLLM 0.26 | ÷ vLLM | aim |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for name, result in results.items():
        vllm = VLLM.get(name, {})
        for work, speeds in result["workloads"].items():
            shown = " – ".join(f"{speed:,.0f}" for speed in speeds)
            beside = "| |"
            if best := vllm.get(work):
                beside = f"{best:,} | {max(speeds) / best:.2f} × | {TARGETS[work]:.1f} ×"
            lines.append(f"| {name} | {work} | {shown} | {beside} |")
        lines.append(f"| {name} | start to first token, s | {result['ready']:.1f} | {vllm.get('ready', '')} | | |")
        if wall := result.get("wall"):
            lines.append(
                f"| {name} | decode_b1 ÷ memory's limit ({wall['tokens_per_second']:.0f} tok/s) | "
                f"{wall['share']:.0%} | | | 80 % |"
            )
    lines += [
        "",
        "Microseconds of a decode step, at some 540 tokens of context:",
        "",
        "| model | batch | " + " | ".join(PARTS) + " |",
        "| --- | ---: |" + " ---: |" * len(PARTS),
    ]
    for name, result in results.items():
        for batch, parts in result["parts"].items():
            cells = " | ".join(f"{parts[k]:,.0f}" for k in PARTS)
            lines.append(f"| {name} | {batch} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=",".join(MODELS), help="comma-separated")
    parser.add_argument("--dtype", default="bf16", help="comma-separated: bf16, fp8, fp8-block, int4, mxfp4")
    parser.add_argument("--kv-cache-dtype", default="auto", help="auto or fp8")
    parser.add_argument("--attention", default="auto", help="prefill attention: auto, triton or flashinfer")
    parser.add_argument("--workloads", default=",".join(TARGETS), help="comma-separated")
    parser.add_argument("--step-tokens", type=int, default=STEP_TOKENS)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="each workload once, smaller")
    parser.add_argument("--check", nargs="?", const="", help="run bench.gpu_check first, or the given checks")
    parser.add_argument(
        "--tune", action="store_true", help="first tune decode attention, finally compare steps with and without PDL"
    )
    parser.add_argument("--no-parts", action="store_true", help="skip the profile by kind of kernel")
    parser.add_argument("--host", action="store_true", help="also profile the host")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: nothing to measure")
        return 2
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    log(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if options.check is not None:
        from bench.gpu_check import check

        if not check(log, options.check):
            return 1
    if options.tune:
        from bench import gpu_tune

        options.tiles = gpu_tune.tune_decode_attention(log)
    bandwidths = measure_bandwidth()
    log(f"copy {bandwidths['copy']:.0f} GB/s, read {bandwidths['read']:.0f} GB/s")
    torch.cuda.empty_cache()
    results: dict[str, Any] = {}
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    for name in options.model.split(","):
        for dtype in options.dtype.split(","):
            label = name if dtype == "bf16" else f"{name} {dtype}"
            if options.kv_cache_dtype != "auto":
                label += f", {options.kv_cache_dtype} cache"
            results[label] = measure(name, options, dtype, bandwidths)
            text = render_table(results, bandwidths)  # after each, so that an interrupted run leaves results
            (folder / "gpu.md").write_text(text)
            (folder / "gpu.json").write_text(json.dumps({"rates": bandwidths, "models": results}, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
