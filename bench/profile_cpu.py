"""Profile a forward pass on the CPU, kernel by kernel: `python -m bench.profile_cpu`.

Runs the default model's shapes through the compiled kernels, each layer with its own weights, so that these come from
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
from syringa.engine.cpu.layers.linear import Gate, Int8Linear
from syringa.engine.cpu.layers.native_ops import attend
from syringa.engine.cpu.native import AttentionShape, Kernels, load_kernels
from syringa.engine.execution.batch import StepTensors
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

LAYERS, HIDDEN, HEADS, KV_HEADS, SIZE, INNER, VOCAB = 30, 576, 9, 3, 64, 1536, 49152
REPEATS = 7
CONTEXT = 132  # tokens before the decoded one


def median(run: Callable[[], None]) -> float:
    """Return the median milliseconds, after a warm-up run."""
    run()
    times = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return 1000 * sorted(times)[REPEATS // 2]


def linear_layers(kernels: Kernels) -> Callable[[int], float]:
    def make(outputs: int, inputs: int, gated: bool = False) -> Int8Linear:
        return Int8Linear(kernels, torch.randn(outputs, inputs), None, gate=Gate() if gated else None)

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


def time_attention(kernels: Kernels, sequences: int, queries: int, first: int) -> float:
    width = -(-(first + queries) // BLOCK_SIZE)
    cache = CacheTensors(LAYERS, sequences * width, KV_HEADS, SIZE, torch.bfloat16)
    cache.keys.normal_(), cache.values.normal_()
    step = StepTensors(
        tokens=torch.empty(0),
        positions=torch.empty(0),
        slot_mapping=torch.empty(0),
        row_starts=torch.arange(0, sequences * queries + 1, queries, dtype=torch.int32),
        first_positions=torch.full((sequences,), first, dtype=torch.int32),
        block_tables=torch.arange(sequences * width, dtype=torch.int32).view(sequences, width),
        logit_rows=torch.empty(0),
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
    layers = linear_layers(kernels)
    table = Table(
        "workload", "matmuls", "GMAC/s", "attention", "output head", title=f"{kernels.variant}, ms for all layers"
    )
    per_row = LAYERS * (HIDDEN * (HEADS + 2 * KV_HEADS) * SIZE + HIDDEN * HIDDEN + 3 * HIDDEN * INNER)
    for sequences in (1, 4, 16, 64):
        rows = torch.randn(sequences, HIDDEN)
        matmul_ms = layers(sequences)
        rate = sequences * per_row / matmul_ms / 1e6
        head_ms = median(lambda rows=rows: head(rows))  # type: ignore[misc]
        attention_ms = time_attention(kernels, sequences, 1, CONTEXT)
        table.add_row(
            f"a step of {sequences}", f"{matmul_ms:.2f}", f"{rate:.0f}", f"{attention_ms:.2f}", f"{head_ms:.2f}"
        )
    matmul_ms = layers(500) * 2
    attention_ms = time_attention(kernels, 1, 1000, 0)
    table.add_row(
        "a prompt of 1,000", f"{matmul_ms:.0f}", f"{1000 * per_row / matmul_ms / 1e6:.0f}", f"{attention_ms:.0f}", ""
    )
    Console().print(table)


if __name__ == "__main__":
    main()
