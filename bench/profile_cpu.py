"""Where the time of a forward pass goes, kernel by kernel: `python -m bench.profile_cpu`.

Runs the default model's shapes through the compiled kernels, each layer with weights of its own, so that they come from
memory as in a real step. Prints milliseconds for all layers together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from syringa.engine.cpu.features import available_cores
from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.linear import Int8Linear
from syringa.engine.cpu.layers.native_ops import attend
from syringa.engine.cpu.native import AttentionShape, Kernels, load_kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

LAYERS, HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
REPEATS = 7
CONTEXT = 132  # tokens before the one that is decoded


def median(run: Callable[[], None]) -> float:
    """Milliseconds, after one run to warm up."""
    run()
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return 1000 * sorted(times)[REPEATS // 2]


def products(kernels: Kernels) -> Callable[[int], float]:
    def make(outputs: int, inputs: int, gated: bool = False) -> Int8Linear:
        return Int8Linear(kernels, torch.randn(outputs, inputs), None, gated=gated)

    qkv = (HEADS + 2 * KV_HEADS) * SIZE
    layers = [
        (make(qkv, HIDDEN), make(HIDDEN, HIDDEN), make(2 * INNER, HIDDEN, gated=True), make(HIDDEN, INNER))
        for _ in range(LAYERS)
    ]

    def measure(rows: int) -> float:
        narrow, wide = torch.randn(rows, HIDDEN), torch.randn(rows, INNER)

        def run() -> None:
            for first, out, gate_up, down in layers:
                first(narrow), out(narrow), gate_up(narrow), down(wide)

        return median(run)

    return measure


def attention(kernels: Kernels, sequences: int, queries: int, first: int) -> float:
    width = -(-(first + queries) // BLOCK_SIZE)
    cache = CacheTensors(LAYERS, sequences * width, KV_HEADS, SIZE, torch.bfloat16)
    cache.keys.normal_(), cache.values.normal_()
    step = StepTensors(
        tokens=torch.empty(0),
        positions=torch.empty(0),
        slots=torch.empty(0),
        starts=torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32),
        first=torch.full((sequences,), first, dtype=torch.int32),
        tables=torch.arange(sequences * width, dtype=torch.int32).view(sequences, width),
        wanted=torch.empty(0),
    )
    q = torch.randn(sequences * queries, HEADS * SIZE)
    out = torch.empty_like(q)
    shape = AttentionShape(HEADS, KV_HEADS, SIZE, 0, SIZE**-0.5)

    def run() -> None:
        for layer in cache.layers:
            attend(kernels, shape, step, layer.keys.data_ptr(), layer.values.data_ptr(), q, q.shape[1], out, True)

    return median(run)


def main() -> None:
    kernels = load_kernels(available_cores())
    if kernels is None:
        raise SystemExit("error: the kernels were not built here: install a C++ compiler and reinstall")
    torch.set_num_threads(1)
    head = Int8Linear(kernels, torch.randn(VOCAB, HIDDEN), None)
    layers = products(kernels)
    table = Table(
        "what", "products", "GMAC/s", "attention", "output head", title=f"{kernels.variant}, ms for all layers"
    )
    per_row = LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * SIZE + HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    for sequences in (1, 4, 16, 64):
        rows = torch.randn(sequences, HIDDEN)
        spent = layers(sequences)
        rate = sequences * per_row / spent / 1e6
        heads = median(lambda rows=rows: head(rows))  # type: ignore[misc]
        seen = attention(kernels, sequences, 1, CONTEXT)
        table.add_row(f"a step of {sequences}", f"{spent:.2f}", f"{rate:.0f}", f"{seen:.2f}", f"{heads:.2f}")
    spent = layers(500) * 2
    seen = attention(kernels, 1, 1000, 0)
    table.add_row("a prompt of 1,000", f"{spent:.0f}", f"{1000 * per_row / spent / 1e6:.0f}", f"{seen:.0f}", "")
    Console().print(table)


if __name__ == "__main__":
    main()
