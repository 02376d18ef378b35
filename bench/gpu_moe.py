"""Check, tune and time the mixture-of-experts kernels at real shapes on a GPU: `python -m bench.gpu_moe [model]`.

One layer of Qwen3-30B-A3B (128 experts, 8 used), or of another model of `SHAPES`, with random weights. For each number
of tokens: the error against the reference, the time of routing, of both grouped products with the best of several tile
sizes, and of the whole layer, with the bandwidth and the arithmetic rate that this means. Weights of a layer are 1.2 GB
or more, so nothing stays in the L2 cache; the few experts of a single token are rotated.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench_cudagraph

from syringa.engine.gpu.kernels import moe, reference
from syringa.engine.models.config import ClampedSwiglu

SHAPES = {  # hidden size, intermediate size, experts, experts per token, layers
    "qwen3-30b-a3b": (2048, 768, 128, 8, 48),
    "gpt-oss-20b": (2880, 2880, 32, 4, 24),
    "mixtral-8x7b": (4096, 14_336, 8, 2, 32),
}
MODEL = sys.argv[1] if len(sys.argv) > 1 else "qwen3-30b-a3b"
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K, LAYERS = SHAPES[MODEL]
SWIGLU = ClampedSwiglu(1.702, 7.0) if MODEL == "gpt-oss-20b" else None  # with biases
TOKENS = (1, 2, 8, 16, 64, 256, 1024, 2048, 8192)


def candidates(tokens: int) -> list[moe.MoeConfig]:
    per_expert = tokens * TOP_K / EXPERTS
    if per_expert <= 16:
        tiles = itertools.product((16, 32), (32, 64, 128), (128, 256), (4,), (2, 3, 4))
    elif per_expert <= 128:
        tiles = itertools.product((32, 64), (64, 128), (64, 128), (4,), (3, 4))
    else:
        tiles = itertools.product((128,), (128, 256), (64,), (8,), (3, 4))
    found = [moe.MoeConfig(*each) for each in tiles]
    # What cannot fit into shared memory is not worth compiling.
    return [c for c in found if (c.pairs + 2 * c.outputs) * c.inputs * 2 * c.stages <= 220_000]


def main() -> None:
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

    gate_up = random(EXPERTS, 2 * INTERMEDIATE, HIDDEN) * HIDDEN**-0.5
    down = random(EXPERTS, HIDDEN, INTERMEDIATE) * INTERMEDIATE**-0.5
    biases = (random(EXPERTS, 2 * INTERMEDIATE), random(EXPERTS, HIDDEN)) if SWIGLU else None
    results = []
    for tokens in TOKENS:
        x = random(tokens, HIDDEN)
        logit_sets = [random(tokens, EXPERTS) for _ in range(8 if tokens <= 8 else 1)]
        row = _measure(x, logit_sets, gate_up, down, biases, quick=tokens not in (1, 8, 64, 256, 8192))
        results.append(row)
        print(json.dumps(row), flush=True)
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    name = "gpu_moe.json" if MODEL == "qwen3-30b-a3b" else f"gpu_moe-{MODEL}.json"
    (folder / name).write_text(json.dumps(results, indent=1) + "\n")


def _measure(
    x: torch.Tensor,
    logit_sets: list[torch.Tensor],
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None,
    *,
    quick: bool,
) -> dict[str, object]:
    tokens = len(x)
    chosen = moe.choose_moe_configs(tokens, TOP_K, EXPERTS)
    options: dict[str, Any] = {"biases": biases, "swiglu": SWIGLU}
    found = moe.moe_mlp(x, logit_sets[0], gate_up, down, TOP_K, **options)
    error = None
    if tokens <= 256:
        exact = {"biases": biases and tuple(bias.float() for bias in biases), "swiglu": SWIGLU}
        expected = reference.moe_mlp(x.float(), logit_sets[0], gate_up.float(), down.float(), TOP_K, **exact)
        error = float((found.float() - expected).norm() / expected.norm())
    again = moe.moe_mlp(x, logit_sets[0], gate_up, down, TOP_K, **options)
    gate_up_bias, down_bias = biases or (None, None)
    ids = reference.route(logit_sets[0], TOP_K, normalize=True)[1]
    distinct = len(ids.unique())
    activated = torch.empty(tokens * TOP_K, INTERMEDIATE, dtype=x.dtype, device=x.device)
    outputs = torch.empty(tokens * TOP_K, HIDDEN, dtype=x.dtype, device=x.device)

    def best(gated: bool, block: int | None) -> tuple[float, moe.MoeConfig]:
        times: list[tuple[float, moe.MoeConfig]] = []
        for config in [chosen[0 if gated else 1]] if quick else candidates(tokens):
            if block is not None and config.pairs != block:
                continue
            try:
                routings = [moe.route(each, TOP_K, normalize=True, block=config.pairs) for each in logit_sets]

                def run(config: moe.MoeConfig = config, routings: list[moe.Routing] = routings) -> None:
                    for routing in routings:
                        if gated:
                            moe._grouped(
                                x, gate_up, routing, activated,
                                gated=True, config=config, bias=gate_up_bias, swiglu=SWIGLU,
                            )  # fmt: skip
                        else:
                            moe._grouped(activated, down, routing, outputs, gated=False, config=config, bias=down_bias)

                times.append((1000 * do_bench_cudagraph(run, rep=10) / len(routings), config))
            except Exception as error:
                print(f"# {config}: {type(error).__name__}", flush=True)
        return min(times)

    first_us, first = best(True, None)
    second_us, second = best(False, first.pairs)

    def route() -> None:
        for each in logit_sets:
            moe.route(each, TOP_K, normalize=True, block=first.pairs)

    def layer() -> None:
        for each in logit_sets:
            moe.moe_mlp(x, each, gate_up, down, TOP_K, residual=x, configs=chosen, pdl=tokens <= 64, **options)

    route_us = 1000 * do_bench_cudagraph(route, rep=10) / len(logit_sets)
    layer_us = 1000 * do_bench_cudagraph(layer, rep=10) / len(logit_sets)
    weight_bytes = distinct * 3 * HIDDEN * INTERMEDIATE * 2
    operations = tokens * TOP_K * 3 * HIDDEN * INTERMEDIATE * 2
    return {
        "tokens": tokens,
        "distinct_experts": distinct,
        "error": error,
        "same_bits_twice": bool(torch.equal(found, again)),
        "route_us": round(route_us, 1),
        "gate_up_us": round(first_us, 1),
        "down_us": round(second_us, 1),
        "layer_us": round(layer_us, 1),
        "layers_ms": round(layer_us * LAYERS / 1000, 2),
        "weights_tb_s": round(weight_bytes / (first_us + second_us) / 1e6, 2),
        "tflop_s": round(operations / (first_us + second_us) / 1e6, 1),
        "chosen": [list(each) for each in chosen],
        "gate_up_tiles": list(first),
        "down_tiles": list(second),
    }


def profile() -> None:
    """Print the time of each kernel of a layer."""
    device = torch.device("cuda")
    gate_up = torch.randn(EXPERTS, 2 * INTERMEDIATE, HIDDEN, device=device, dtype=torch.bfloat16)
    down = torch.randn(EXPERTS, HIDDEN, INTERMEDIATE, device=device, dtype=torch.bfloat16)
    for tokens in (1, 64, 8192):
        x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)
        logits = torch.randn(tokens, EXPERTS, device=device, dtype=torch.bfloat16)
        moe.moe_mlp(x, logits, gate_up, down, TOP_K, residual=x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            for _ in range(10):
                moe.moe_mlp(x, logits, gate_up, down, TOP_K, residual=x)
            torch.cuda.synchronize()
        for event in found.key_averages():
            print(f"# {tokens:5} {event.device_time_total / event.count:9.1f} us  {event.count:3}  {event.key[:60]}")


if __name__ == "__main__":
    profile()
    main()
