"""Check and time the kernels of `syringa.engine.gpu` on a CUDA device. Needs only torch and Triton.

    python3 bench/gpu_kernels.py [--only linear,decode,…] [--quick]

Every kernel is compared with a reference in float32 or float64 on fresh random inputs, with outputs initialized to NaN,
and run repeatedly to check that it is deterministic. Times are medians of CUDA graph replays, per launch, over inputs
that together exceed the L2 cache. Configurations are chosen from short lists; the best ones are what the kernels'
`choose_config` should return. JSON goes to $OUT/gpu_kernels.json if $OUT is set.
"""

# ruff: noqa: B023
from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
import triton

from bench.gpu_attention import bench_decode, bench_prefill
from bench.gpu_flashinfer import bench_flashinfer
from bench.kernel_harness import (
    BF16,
    BLOCK,
    DEVICE,
    MODELS,
    VOCAB,
    Launch,
    ModelShape,
    PagedCache,
    add_row,
    best_configs,
    check,
    check_deterministic_gpu,
    copies_beyond_l2,
    failures,
    int_tensor,
    measure_peak_rates,
    nan_tensor,
    peak_rates,
    random_tensor,
    report,
    rotary_tables,
    table_lines,
    time_launches,
    tune,
)
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.kernels.decode_attention import NewTokens, decode_attention
from syringa.engine.gpu.kernels.elementwise import add_rms_norm, rms_norm, silu_mul
from syringa.engine.gpu.kernels.gemv import GemvConfig
from syringa.engine.gpu.kernels.rotary import rotate_and_store
from syringa.engine.gpu.kernels.sampling import sample
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig
from syringa.engine.gpu.ops.linear import LinearConfig, linear

# By inputs: all warps of an iteration should lie along them, so that no input is loaded twice.
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


def bench_elementwise() -> None:
    for hidden, intermediate in ((4096, 12288), (1024, 3072)):
        weight = random_tensor(hidden, dtype=torch.float32)
        x, residual, gate_up = random_tensor(7, hidden), random_tensor(7, hidden), random_tensor(7, 2 * intermediate)
        check(
            "rms_norm", rms_norm(x, weight, 1e-6, nan_tensor(7, hidden)), reference.rms_norm(x.double(), weight, 1e-6)
        )
        kept = residual.double()
        expected = reference.add_rms_norm(x.double(), kept, weight, 1e-6, torch.float64)
        check("add_rms_norm", add_rms_norm(x, residual, weight, 1e-6, nan_tensor(7, hidden)), expected)
        check("add_rms_norm residual", residual, kept)
        check("silu_mul", silu_mul(gate_up, nan_tensor(7, intermediate)), reference.silu_mul(gate_up.double()))
        for rows in (1, 64, 4096):
            n = min(16, copies_beyond_l2(rows * hidden * 4))
            sets = [
                (random_tensor(rows, hidden), random_tensor(rows, hidden), random_tensor(rows, 2 * intermediate))
                for _ in range(n)
            ]
            outs = torch.empty(rows, hidden, device=DEVICE, dtype=BF16)
            hidden = torch.empty(rows, intermediate, device=DEVICE, dtype=BF16)
            us = time_launches([lambda s=s: add_rms_norm(s[0], s[1], weight, 1e-6, outs) for s in sets])
            other = time_launches([lambda s=s: F.rms_norm(s[0] + s[1], (hidden,), weight.to(BF16)) for s in sets])
            add_row(f"add_rms_norm {rows}x{hidden}", us, rows * hidden * 8, "GB/s", f"torch {other:.1f}")
            us = time_launches([lambda s=s: silu_mul(s[2], hidden) for s in sets])
            add_row(f"silu_mul {rows}x{intermediate}", us, rows * intermediate * 6, "GB/s")


def linear_shapes(model: ModelShape) -> list[tuple[str, int, int, dict[str, Any]]]:
    """Return name, outputs, inputs and fused operations of the linear layers of a decode step."""
    m = model
    qkv = (m.heads + 2 * m.kv_heads) * m.size
    return [
        ("qkv", qkv, m.hidden, {"norm_weight": True}),
        ("o", m.hidden, m.heads * m.size, {"residual": True}),
        ("gate_up", m.intermediate, m.hidden, {"norm_weight": True, "gated": True}),
        ("down", m.hidden, m.intermediate, {"residual": True}),
        ("head", VOCAB, m.hidden, {"norm_weight": True, "out_dtype": torch.float32}),
    ]


def options_for(
    rows: int, outputs: int, inputs: int, fused: dict[str, Any], config: LinearConfig | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"eps": 1e-6, "config": config, "gated": fused.get("gated", False)}
    options["out"] = nan_tensor(rows, outputs, dtype=fused.get("out_dtype", BF16))
    if fused.get("norm_weight") and not isinstance(config, SkinnyConfig):
        options["norm_weight"] = random_tensor(inputs)
    if fused.get("residual"):
        options["residual"] = random_tensor(rows, outputs)
    return options


def bench_linear(quick: bool) -> None:
    for model in MODELS:
        for name, outputs, inputs, fused in linear_shapes(model):
            height = outputs * (2 if fused.get("gated") else 1)
            n = copies_beyond_l2(height * inputs * 2)
            weights = [random_tensor(height, inputs, scale=inputs**-0.5) for _ in range(n)]
            for rows in (1, 16, 64):
                x = random_tensor(rows, inputs)
                configs: list[Any] = [GemvConfig(*c) for c in GEMV[inputs]] if rows == 1 else SKINNY[rows]
                configs = configs[-2:] if quick else configs[4:] if name == "head" and rows > 1 else configs
                for config in configs:
                    options = options_for(rows, outputs, inputs, fused, config)
                    kept = {k: v for k, v in options.items() if k not in ("config", "out")}
                    if name != "head" or config is configs[0]:
                        expected = reference.linear(x, weights[0], out_dtype=torch.float32, **kept)
                        try:
                            out = linear(x, weights[0], pdl=True, **options)
                        except triton.runtime.errors.OutOfResources:
                            continue
                        check(f"linear {type(config).__name__} x{rows}", out, expected)

                def launches(
                    config: LinearConfig, x: torch.Tensor = x, ws: list[torch.Tensor] = weights
                ) -> list[Launch]:
                    options = options_for(len(x), outputs, inputs, fused, config)
                    return [lambda w=w: linear(x, w, pdl=True, **options) for w in ws]

                config, us = tune(launches, configs, f"linear {model.name} {name} x{rows}")
                best_configs[rows, outputs, inputs] = config
                options = options_for(rows, outputs, inputs, fused, config)
                check_deterministic_gpu(f"linear {config}", lambda: linear(x, weights[0], pdl=True, **options), 5)
                without_pdl = time_launches([lambda w=w: linear(x, w, **options) for w in weights])
                library = time_launches([lambda w=w: F.linear(x, w) for w in weights])
                size = height * inputs * 2
                add_row(
                    f"{model.name} {name} {rows}x{height}x{inputs}",
                    us,
                    size,
                    "GB/s",
                    f"{without_pdl:.1f}, cuBLAS {library:.1f}",
                    config,
                )


def bench_rotary() -> None:
    heads, kv_heads, size = 32, 8, 128
    rotary, norms = (
        rotary_tables(8192, size),
        (random_tensor(size, dtype=torch.float32), random_tensor(size, dtype=torch.float32)),
    )
    for rows in (1, 64, 4096):
        qkv = random_tensor(rows, (heads + 2 * kv_heads) * size)
        keys, values = (nan_tensor(rows // BLOCK + 1, kv_heads, BLOCK, size) for _ in range(2))
        positions, slots = torch.arange(rows, device=DEVICE, dtype=torch.int32), torch.randperm(rows, device=DEVICE)
        expected = [t.double() for t in (qkv, keys, values)]
        arguments = positions, slots, rotary, norms, 1e-6
        reference.rotate_and_store(expected[0], *arguments, expected[1], expected[2], heads, torch.float64)
        work = qkv.clone()
        rotate_and_store(work, *arguments, keys, values, heads)
        check("rotate_and_store q", work, expected[0])
        if not torch.equal(keys.isnan(), expected[1].isnan()):
            failures.append("rotate_and_store: wrong slots were written")
        check("rotate_and_store k", keys.nan_to_num(), expected[1].nan_to_num())
        check("rotate_and_store v", values.nan_to_num(), expected[2].nan_to_num())
        sets = [qkv.clone() for _ in range(min(16, copies_beyond_l2(qkv.nbytes)))]
        us = time_launches([lambda s=s: rotate_and_store(s, *arguments, keys, values, heads) for s in sets])
        add_row(f"rotate_and_store {rows}", us, 2 * qkv.nbytes, "GB/s")


def bench_sampling() -> None:
    for batch in (1, 64, 256):
        logits = random_tensor(batch, VOCAB, scale=3.0, dtype=torch.float32)
        index = torch.arange(batch, device=DEVICE)
        keys = index * 7919 - 50, (index % 3).int(), (index * 5).int()
        warm = torch.full((batch,), 0.6, device=DEVICE)
        kinds = [("plain", warm, None), ("greedy", warm * 0, None)]
        for name, k, p, m in (
            ("top-k 20 top-p .95", 20, 0.95, 0.0),
            ("top-p .9", 0, 0.9, 0.0),
            ("min-p .05", 0, 1.0, 0.05),
        ):
            rules = int_tensor([k] * batch), torch.full((batch,), p, dtype=torch.float64, device=DEVICE), warm * 0 + m
            kinds.append((name, warm, rules))
        for name, temperatures, rules in kinds:
            out = torch.full((batch,), -7, device=DEVICE)
            tokens = sample(logits, temperatures, *keys, *(rules or ()), out=out)
            expected = reference.sample(logits, temperatures, *keys, *(rules or ()))
            wrong = int((tokens != expected).sum())
            report["checks"][f"sample {name} x{batch} differ"] = wrong
            if wrong > batch // 64:  # a random number may fall on the boundary between two tokens
                failures.append(f"sample {name}: {wrong} of {batch} tokens differ from the reference")
            us = time_launches([lambda t=temperatures, r=rules: sample(logits, t, *keys, *(r or ()), out=out)])
            add_row(f"sample {name} {batch}", us, batch * VOCAB * 4, "GB/s")


def bench_decode_step() -> None:
    """Time a whole decode step on random weights with the tuned configurations."""
    for model in MODELS:
        m = model
        shapes = linear_shapes(m)
        layers = [
            {n: random_tensor(o * (2 if f.get("gated") else 1), i, scale=i**-0.5) for n, o, i, f in shapes[:-1]}
            for _ in range(m.layers)
        ]
        head = random_tensor(VOCAB, m.hidden, scale=m.hidden**-0.5)
        ones, norms = torch.ones(m.hidden, device=DEVICE, dtype=BF16), (torch.ones(m.size, device=DEVICE),) * 2
        read = 2 * (sum(w.numel() for layer in layers for w in layer.values()) + head.numel())
        for batch, length in ((1, 384), (64, 384)):
            caches = [PagedCache([length] * batch, m.kv_heads, m.size) for _ in range(m.layers)]
            rotary = rotary_tables(length, m.size)
            new_tokens = [NewTokens(c.last_slots(), rotary, norms, 1e-6) for c in caches]
            begin, x = random_tensor(batch, m.hidden), random_tensor(batch, m.hidden)
            index = torch.arange(batch, device=DEVICE)
            warm = torch.full((batch,), 0.6, device=DEVICE)
            logits = nan_tensor(batch, VOCAB, dtype=torch.float32)

            def linear_layer(x: torch.Tensor, weight: torch.Tensor, **rest: Any) -> torch.Tensor:
                outputs = len(weight) // 2 if rest.get("gated") else len(weight)
                return linear(x, weight, config=best_configs.get((batch, outputs, weight.shape[1])), eps=1e-6, **rest)

            def step(pdl: bool) -> torch.Tensor:
                x.copy_(begin)
                tiles = best_configs.get((m.heads, batch))
                for layer, cache, new in zip(layers, caches, new_tokens, strict=True):
                    qkv = linear_layer(x, layer["qkv"], norm_weight=ones, pdl=pdl)
                    attended = decode_attention(qkv, *cache.tensors, m.heads, new=new, config=tiles, pdl=pdl)
                    linear_layer(attended, layer["o"], residual=x, out=x, pdl=pdl)
                    hidden = linear_layer(x, layer["gate_up"], norm_weight=ones, gated=True, pdl=pdl)
                    linear_layer(hidden, layer["down"], residual=x, out=x, pdl=pdl)
                linear_layer(x, head, norm_weight=ones, out=logits, pdl=pdl)
                return sample(logits, warm, index, index, index, pdl=pdl)

            def library_step() -> torch.Tensor:
                x.copy_(begin)
                normed = rms_norm(x, ones, 1e-6)
                for layer, cache, new in zip(layers, caches, new_tokens, strict=True):
                    attended = decode_attention(
                        F.linear(normed, layer["qkv"]),
                        *cache.tensors,
                        m.heads,
                        new=new,
                        config=best_configs.get((m.heads, batch)),
                    )
                    normed = add_rms_norm(F.linear(attended, layer["o"]), x, ones, 1e-6)
                    hidden = silu_mul(F.linear(normed, layer["gate_up"]))
                    normed = add_rms_norm(F.linear(hidden, layer["down"]), x, ones, 1e-6)
                return sample(F.linear(normed, head).float(), warm, index, index, index)

            kept = []
            size = read + 2 * batch * length * m.kv_heads * m.size * 2 * m.layers
            ways = {"": lambda: step(False), " pdl": lambda: step(True), " cuBLAS": library_step}
            for name, way in ways.items():
                us = time_launches([way], 60.0)
                kept.append(logits.clone())
                add_row(f"step {m.name} {batch}x{length}{name}", us, size, "GB/s", f"{batch / us * 1e6:,.0f} tok/s")
            if not (bool(kept[0].isfinite().all()) and torch.equal(kept[0], kept[1])):
                failures.append(f"step {m.name}: programmatic dependent launch changed the logits")


def main() -> int:
    parts: dict[str, Launch] = {
        "elementwise": bench_elementwise,
        "rotary": bench_rotary,
        "decode": bench_decode,
        "sample": bench_sampling,
        "linear": lambda: bench_linear(options.quick),
        "step": bench_decode_step,
        "prefill": bench_prefill,
        "flashinfer": bench_flashinfer,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="comma-separated parts: " + ", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: the kernels' logic is tested by tests/engine/gpu under Triton's interpreter")
        return 2
    torch.manual_seed(time.time_ns() % 2**31)
    print(torch.cuda.get_device_name(), torch.__version__, "triton", triton.__version__)
    peak_rates.update(measure_peak_rates())
    for name, part in parts.items():
        if not options.only or name in options.only.split(","):
            begin = time.perf_counter()
            try:
                part()
            except Exception as error:  # keep the figures of the other parts
                failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - begin:.0f} s", flush=True)
            report["failures"] = failures
            if out := os.environ.get("OUT"):
                Path(out, "gpu_kernels.json").write_text(json.dumps(report, indent=1))
    print("\nlargest relative errors:", {k: f"{v:.1e}" for k, v in report["checks"].items()})
    print(f"{'kernel':<34}{'µs':>9}{'rate':>8}         share  no PDL, alternative    config")
    print("\n".join(table_lines))
    print("FAILED:\n" + "\n".join(failures) if failures else "all checks passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
