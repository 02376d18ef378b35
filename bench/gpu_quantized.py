"""Check, tune and time products with quantized weights on a GPU: `python -m bench.gpu_quantized [--only dense,moe]`.

The linear layers of Qwen3-8B with FP8 weights (one scale per output, or per block of 128 × 128) and INT4 weights
(groups of 128), and one layer of experts: gpt-oss-20b in MXFP4 and Qwen3-30B-A3B in FP8. For each number of rows: the
error against the same weights in fp32, and the time of the best of several tile sizes with the bandwidth that it means.
Products of more than 64 rows in FP8 are timed without the quantization of the rows, as cuBLAS's are, and without the
gate. Kernels are compiled first, by several processes.
"""

# ruff: noqa: B023, E501
from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from bench.kernel_harness import Launch, copies_beyond_l2, measure_peak_rates, random_tensor, time_launches
from syringa.engine.gpu.kernels import moe, reference
from syringa.engine.gpu.kernels.fp8 import quantize_rows
from syringa.engine.gpu.kernels.gemv import GemvConfig
from syringa.engine.gpu.kernels.int4_gemv import Int4GemvConfig
from syringa.engine.gpu.kernels.launch import num_processors
from syringa.engine.gpu.kernels.quantized_gemm import QuantizedConfig, dequantize, quantized_gemm
from syringa.engine.gpu.ops.quantized_linear import FUSED_ROWS, quantized_linear
from syringa.engine.gpu.packed_weight import PackedWeight, pack_weight, stack_packed, unpack_weight
from syringa.engine.loading.quantized import QuantizedWeight, quantize_fp8
from syringa.engine.models.config import ClampedSwiglu

LAYERS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288)}
KINDS = ("fp8 channel", "fp8 128", "int4 128")
ROWS = (1, 2, 16, 64, 72, 80, 128, 192, 256)
CUBLAS_ROWS = (16, 32, *(rows for rows in ROWS if rows >= 64))


class Case(NamedTuple):
    kind: str
    layer: str
    rows: int


def random_weight(kind: str, outputs: int, inputs: int) -> QuantizedWeight:
    form, detail = kind.split()
    group = inputs if detail == "channel" else int(detail)
    groups = inputs // group
    scales = torch.rand(outputs, groups, device="cuda") * 0.01 + 0.001
    if kind == "fp8 128":
        scales = scales[::128].repeat_interleave(128, 0)
    if form == "fp8":
        return QuantizedWeight("fp8", quantize_fp8(random_tensor(outputs, inputs))[0], scales, group)
    codes = torch.randint(0, 16, (outputs, inputs), device="cuda", dtype=torch.uint8)
    if form == "mxfp4":
        return QuantizedWeight("mxfp4", codes, torch.exp2(torch.rand_like(scales) * -4 - 5).bfloat16(), group)
    return QuantizedWeight("int4", codes, scales.half(), group)


def tiles_of(case: Case) -> list[Any]:
    """Return the candidates, each filling the GPU about once, twice or four times."""
    outputs, inputs = LAYERS[case.layer]
    gated = is_gated(case)
    outputs = outputs // 2 if gated else outputs
    found: list[Any] = []
    if case.rows <= 2 and case.kind == "fp8 channel":
        shapes = [(2, 2048, 4), (4, 2048, 4), (2, 4096, 4), (2, 4096, 8), (4, 4096, 8), (1, 4096, 4), (8, 2048, 8)]
        return [GemvConfig(*shape) for shape in shapes]
    if case.rows <= 2 and case.kind.startswith("int4"):
        sizes = [(1024, 1), (2048, 1), (4096, 1), (1024, 2), (2048, 2), (4096, 2), (2048, 4), (4096, 4), (4096, 8)]
        found = [Int4GemvConfig(*size) for size in sizes]
    waves: tuple[int, ...] = (2, 4, 8)
    if case.rows <= 16:
        base = [(16, 16, 256, 2, 4), (16, 16, 512, 2, 3), (16, 32, 256, 2, 4), (16, 32, 256, 1, 4), (16, 32, 512, 2, 3)]
        base += [(16, 32, 256, 4, 4), (16, 64, 256, 4, 3)]
    elif case.rows <= 64 and case.kind.startswith("fp8"):
        waves = (1, 2, 4)
        base = [
            (64, 64, 128, 4, 6),
            (64, 64, 256, 4, 3),
            (64, 128, 128, 4, 4),
            (64, 128, 128, 8, 4),
            (64, 128, 256, 8, 3),
        ]
    elif case.rows <= 64:
        base = [(64, 64, 128, 4, 4), (64, 32, 128, 2, 4), (64, 32, 256, 2, 3), (64, 64, 256, 4, 3), (64, 64, 128, 2, 4)]
    elif case.kind.startswith("fp8"):
        waves = (1, 2)
        base = [(64, 64, 128, 4, 6), (64, 128, 128, 4, 4), (128, 64, 128, 4, 4), (128, 128, 128, 8, 4)]
    else:
        waves = (1, 2)
        base = [(64, 64, 128, 4, 4), (64, 128, 128, 8, 3), (128, 128, 128, 8, 3), (128, 64, 128, 4, 3)]
    fp8_rows = case.kind.startswith("fp8") and case.rows > 16
    for shape in base:
        if gated and shape[1] > 64 and shape[0] > 64 and shape[3] < 8:
            continue
        tiles = triton.cdiv(outputs, shape[1]) * triton.cdiv(case.rows, shape[0])
        splits = {max(1, min(round(each * num_processors() / tiles), inputs // 512)) for each in waves}
        found += [QuantizedConfig(*shape, splits=each, fp8_rows=fp8_rows) for each in sorted(splits)]
    return found


def is_gated(case: Case) -> bool:
    """Return whether the kernel applies the gate: rows that are quantized before it take a kernel of their own."""
    return case.layer == "gate_up" and not (case.kind.startswith("fp8") and case.rows > FUSED_ROWS)


def dense_cases(kinds: Sequence[str] = KINDS, rows: Sequence[int] = ROWS) -> list[Case]:
    return list(itertools.starmap(Case, itertools.product(kinds, LAYERS, rows)))


def dense_launches(case: Case, weights: list[PackedWeight], config: Any) -> list[Launch]:
    gated = is_gated(case)
    x = random_tensor(case.rows, weights[0].inputs)
    out = torch.empty(case.rows, len(weights[0]) // (2 if gated else 1), device="cuda", dtype=torch.bfloat16)
    if case.kind.startswith("fp8") and case.rows > FUSED_ROWS:
        rows, scales = quantize_rows(x, weights[0].row_group)
        return [lambda w=w: quantized_gemm(rows, w, None, out, config, x_scales=scales) for w in weights]
    pdl = case.rows <= FUSED_ROWS
    return [lambda w=w: quantized_linear(x, w, gated=gated, out=out, config=config, pdl=pdl) for w in weights]


MOE = {  # hidden size, intermediate size, experts, experts per token
    "mxfp4 32": (2880, 2880, 32, 4),
    "fp8 128": (2048, 768, 128, 8),
}
MOE_TOKENS = (1, 8, 64, 256, 2048, 8192)


def moe_tiles(tokens: int, kind: str) -> list[tuple[QuantizedConfig, QuantizedConfig]]:
    _, _, experts, top_k = MOE[kind]
    per_expert = tokens * top_k / experts
    if per_expert <= 16:
        base = [(16, 16, 256, 2, 4), (16, 32, 256, 2, 4), (16, 32, 512, 2, 3), (16, 32, 256, 1, 4), (16, 32, 128, 2, 6)]
        base += [(32, 32, 256, 2, 3), (32, 64, 128, 4, 4)] if per_expert > 4 else []
    elif per_expert <= 64:
        base = [(32, 32, 256, 2, 3), (32, 64, 128, 4, 4), (64, 64, 128, 4, 3), (64, 32, 128, 2, 4)]
    else:
        base = [(64, 128, 128, 8, 3), (128, 64, 128, 8, 3), (128, 128, 128, 8, 3)]
    if kind.startswith("fp8") and per_expert > 2:
        more = [
            (16, 64, 128, 4, 4),
            (32, 64, 128, 4, 4),
            (64, 64, 128, 4, 4),
            (64, 128, 128, 4, 4),
            (64, 128, 128, 8, 4),
        ]
        more += [(128, 64, 128, 4, 4), (128, 128, 128, 8, 4), (128, 128, 128, 8, 3)]
        limit = 32 if per_expert <= 8 else 64 if per_expert <= 64 else 128
        base += [(*shape, 1, True) for shape in more if limit // 4 < shape[0] <= limit]
    return [(QuantizedConfig(*shape), QuantizedConfig(*shape)) for shape in base]


def moe_weights(kind: str) -> tuple[PackedWeight, PackedWeight]:
    hidden, intermediate, experts, _ = MOE[kind]
    gate_up = stack_packed([pack_weight(random_weight(kind, 2 * intermediate, hidden)) for _ in range(experts)])
    return gate_up, stack_packed([pack_weight(random_weight(kind, hidden, intermediate)) for _ in range(experts)])


def compile_part(part: int, parts: int, only: list[str], cases: list[Case]) -> None:
    """Launch every `parts`-th kernel once, which leaves it in Triton's cache."""
    number = 0
    dense: dict[tuple[str, str], PackedWeight] = {}
    for case in cases if "dense" in only else ():
        for config in tiles_of(case):
            number += 1
            if number % parts != part:
                continue
            key = case.kind, case.layer
            dense[key] = dense.get(key) or pack_weight(random_weight(case.kind, *LAYERS[case.layer]))
            try:
                dense_launches(case, [dense[key]], config)[0]()
            except Exception as error:
                print(f"# {case} {tuple(config)}: {type(error).__name__} {str(error)[:200]}", flush=True)
    for kind in MOE if "moe" in only else ():
        weights = None
        for tokens in MOE_TOKENS:
            for configs in moe_tiles(tokens, kind):
                number += 1
                if number % parts != part:
                    continue
                weights = weights or moe_weights(kind)
                try:
                    run_moe(kind, tokens, *weights, configs)()
                except Exception as error:
                    print(
                        f"# {kind} {tokens} {tuple(configs[0])}: {type(error).__name__} {str(error)[:200]}", flush=True
                    )
    torch.cuda.synchronize()


def run_moe(
    kind: str, tokens: int, gate_up: PackedWeight, down: PackedWeight, configs: Any, exact: bool = False
) -> Launch:
    hidden, intermediate, experts, top_k = MOE[kind]
    generator = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16()
    sets = [torch.randn(tokens, experts, device="cuda", generator=generator) for _ in range(8 if tokens <= 8 else 1)]
    options: dict[str, Any] = {}
    if kind.startswith("mxfp4"):
        biases = torch.randn(experts, 2 * intermediate, device="cuda", generator=generator).bfloat16()
        options = {"biases": (biases, biases[:, :hidden].contiguous()), "swiglu": ClampedSwiglu(1.702, 7.0)}
    if exact:
        floats = {**options, "biases": tuple(b.float() for b in options["biases"])} if options else {}
        return lambda: reference.moe_mlp(
            x.float(), sets[0], unpack_weight(gate_up), unpack_weight(down), top_k, **floats
        )

    def run() -> torch.Tensor:
        for logits in sets:
            out = moe.moe_mlp(x, logits, gate_up, down, top_k, configs=configs, pdl=tokens <= 64, **options)
        return out

    run.launches = len(sets)  # type: ignore[attr-defined]
    run.first = lambda: moe.moe_mlp(x, sets[0], gate_up, down, top_k, configs=configs, **options)  # type: ignore[attr-defined]
    return run


def error_of(found: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = found.double(), expected.double()
    return float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")


def bench_dense(results: list[dict[str, Any]], cases: list[Case]) -> None:
    for kind, layer in dict.fromkeys((case.kind, case.layer) for case in cases):
        outputs, inputs = LAYERS[layer]
        first = pack_weight(random_weight(kind, outputs, inputs))
        weights = [
            first,
            *(pack_weight(random_weight(kind, outputs, inputs)) for _ in range(copies_beyond_l2(first.nbytes) - 1)),
        ]
        matrix = unpack_weight(first)
        for case in [each for each in cases if (each.kind, each.layer) == (kind, layer)]:
            times: dict[str, float] = {}
            worst = 0.0
            for config in tiles_of(case):
                try:
                    x = random_tensor(case.rows, inputs)
                    gated = is_gated(case)
                    expected = reference.linear(x, matrix, gated=gated, out_dtype=torch.float32)
                    torch.cuda.synchronize()
                    found = quantized_linear(x, first, gated=gated, config=config, pdl=case.rows <= FUSED_ROWS)
                    worst = max(worst, error_of(found, expected))
                    times[str(tuple(config))] = time_launches(dense_launches(case, weights, config), 6.0)
                except Exception as error:
                    print(f"# {case} {tuple(config)}: {type(error).__name__}", flush=True)
            ranked = sorted(times.items(), key=lambda item: item[1])[:3]
            best = ranked[0][1] if ranked else float("nan")
            shown = "  ".join(f"{name} {us:.1f}" for name, us in ranked)
            print(
                f"{kind:<12}{layer:<8}{case.rows:>5} {best:8.1f} us {first.nbytes / best / 1e6:5.2f} TB/s err {worst:.1e}  {shown}",
                flush=True,
            )
            results.append({**case._asdict(), "us": best, "error": worst, "times": times})
        if first.cublas_scales is not None:
            for rows in CUBLAS_ROWS:
                rows8, scales = quantize_rows(random_tensor(rows, inputs), first.row_group)
                options: Any = {"out_dtype": torch.bfloat16, "use_fast_accum": first.per_channel}
                us = time_launches(
                    [
                        lambda w=w: torch._scaled_mm(rows8, w.data.t(), scales.t(), w.cublas_scales, **options)
                        for w in weights
                    ]
                )
                print(f"{kind:<12}{layer:<8}{rows:>5} {us:8.1f} us cuBLAS", flush=True)
                results.append({"kind": kind, "layer": layer, "rows": rows, "cublas": us})
        elif kind.startswith("fp8"):
            print(f"# no scales for cuBLAS: {kind} {layer}")
        del weights, matrix


def bench_moe(results: list[dict[str, Any]]) -> None:
    for kind, (hidden, intermediate, experts, top_k) in MOE.items():
        weights = moe_weights(kind)
        for tokens in MOE_TOKENS:
            times: dict[str, float] = {}
            worst = 0.0
            expected = run_moe(kind, tokens, *weights, None, exact=True)() if tokens <= 64 else None
            for configs in moe_tiles(tokens, kind):
                try:
                    run: Any = run_moe(kind, tokens, *weights, configs)
                    if expected is not None:
                        worst = max(worst, error_of(run.first(), expected))
                    times[str(tuple(configs[0]))] = time_launches([run]) / run.launches
                except Exception as error:
                    print(f"# {kind} {tokens} {tuple(configs[0])}: {type(error).__name__}", flush=True)
            ranked = sorted(times.items(), key=lambda item: item[1])[:3]
            best = ranked[0][1]
            read = (weights[0].nbytes + weights[1].nbytes) * min(1.0, tokens * top_k / experts)
            rate = 6 * tokens * top_k * hidden * intermediate / best / 1e6
            shown = "  ".join(f"{name} {us:.1f}" for name, us in ranked)
            print(
                f"{kind:<10}{tokens:>5} tokens {best:8.1f} us <= {read / best / 1e6:5.2f} TB/s {rate:6.1f} TFLOP/s err {worst:.1e}  {shown}",
                flush=True,
            )
            results.append({"kind": kind, "tokens": tokens, "us": best, "error": worst, "times": times})
            if tokens >= 256:
                run = run_moe(kind, tokens, *weights, None)
                us = time_launches(
                    [lambda: (dequantize(weights[0], torch.bfloat16), dequantize(weights[1], torch.bfloat16))]
                )
                print(
                    f"{kind:<10}{tokens:>5} tokens default {time_launches([run]):.0f} us, converting takes {us:.0f} us",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="dense,moe", help="dense, moe or both")
    parser.add_argument("--kinds", default=",".join(KINDS), help="kinds of dense weights")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)), help="numbers of rows of dense weights")
    options = parser.parse_args()
    cases = dense_cases(options.kinds.split(","), [int(rows) for rows in options.rows.split(",")])
    only = options.only.split(",")
    started = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    parts = min(14, os.cpu_count() or 1)
    processes = [context.Process(target=compile_part, args=(part, parts, only, cases)) for part in range(parts)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print(f"compiled after {time.perf_counter() - started:.0f} s", flush=True)
    rates = measure_peak_rates()
    print({name: round(rate) for name, rate in rates.items()}, flush=True)
    results: list[dict[str, Any]] = []
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    steps: list[Any] = []
    steps += [lambda: bench_moe(results)] if "moe" in only else []
    steps += [lambda: bench_dense(results, cases)] if "dense" in only else []
    for step in steps:
        step()
        (folder / "gpu_quantized.json").write_text(json.dumps({"rates": rates, "results": results}, indent=1) + "\n")
        print(f"after {time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
