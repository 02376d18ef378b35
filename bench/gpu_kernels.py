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

from bench.gpu_attention import decodes, flashinfers, prefills
from bench.gpu_lab import (
    BF16,
    BLOCK,
    DEVICE,
    MODELS,
    VOCAB,
    Cache,
    Launch,
    Model,
    best,
    ceilings,
    check,
    copies,
    failed,
    ints,
    lines,
    measure_ceilings,
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
from syringa.engine.gpu.kernels.decode_attention import NewTokens, decode_attention
from syringa.engine.gpu.kernels.elementwise import add_rms_norm, rms_norm, silu_mul
from syringa.engine.gpu.kernels.gemv import GemvConfig
from syringa.engine.gpu.kernels.rotary import rotate_and_store
from syringa.engine.gpu.kernels.sampling import sample
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig
from syringa.engine.gpu.ops.linear import Config, linear

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
    ceilings.update(measure_ceilings())
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


if __name__ == "__main__":
    sys.exit(main())
