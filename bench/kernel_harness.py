"""Shared by the kernel benchmarks: inputs, timing, comparison with references, and the table of results."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

DEVICE, BF16 = "cuda", torch.bfloat16
BEYOND_L2 = 200 << 20  # bytes
VOCAB, BLOCK = 151_936, 16
Launch = Callable[[], Any]


class ModelShape(NamedTuple):
    """The dimensions of a Qwen3 model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    size: int
    intermediate: int


MODELS = [ModelShape("8B", 4096, 36, 32, 8, 128, 12288), ModelShape("0.6B", 1024, 28, 16, 8, 128, 3072)]

report: dict[str, Any] = {"checks": {}, "rows": [], "tuned": {}}
table_lines: list[str] = []
failures: list[str] = []
best_configs: dict[tuple, Any] = {}  # tuned configurations by shape
peak_rates: dict[str, float] = {}  # measured on this device, by unit


def random_tensor(*shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype).mul_(scale)


def int_tensor(values: Iterable[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype, device=DEVICE)


def nan_tensor(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def time_launches(launches: list[Launch], milliseconds: float = 12.0) -> float:
    """Return microseconds per launch: the median of CUDA graph replays."""
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


def copies_beyond_l2(size: int) -> int:
    """Return how many inputs of `size` bytes exceed the L2 cache together."""
    return max(1, min(64, -(-BEYOND_L2 // size)))


def check(name: str, out: torch.Tensor, expected: torch.Tensor, limit: float = 6e-3) -> None:
    """Record the relative error by norm, and a failure if it exceeds the limit."""
    a, b = out.double(), expected.double()
    error = float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")
    report["checks"][name] = max(error, report["checks"].get(name, 0.0))
    if not error < limit:
        failures.append(f"{name}: relative error {error:.2e}, allowed {limit:.0e}")


def check_deterministic_gpu(name: str, launch: Callable[[], torch.Tensor], times: int = 20) -> None:
    """Record a failure if repeated launches differ in any bit."""
    first = launch().clone()
    if not all(torch.equal(first, launch()) for _ in range(times)):
        failures.append(f"{name}: results differ between launches")


def add_row(name: str, us: float, amount: float, unit: str, other: str = "", config: object = "") -> None:
    """Add a result. `amount` is bytes or operations per launch; the share is of the measured peak rate."""
    rate = amount / us / (1e3 if unit == "GB/s" else 1e6)
    share = rate / peak_rates[unit]
    report["rows"].append({"name": name, "us": us, "rate": rate, "unit": unit, "share": share, "other": other})
    settings = ",".join(map(str, config)) if isinstance(config, tuple) else str(config)
    table_lines.append(f"{name:<34}{us:9.1f}{rate:8.0f} {unit:<7} {share:4.0%}  {other:<22} {settings}")
    print(table_lines[-1], flush=True)


def tune(launches: Callable[[Any], list[Launch]], configs: Iterable[Any], name: str) -> tuple[Any, float]:
    """Return the fastest configuration and its microseconds per launch."""
    results = {}
    for config in configs:
        try:
            results[config] = time_launches(launches(config), 6.0)
        except triton.runtime.errors.OutOfResources:
            continue
    report["tuned"][name] = {str(tuple(c)): round(t, 2) for c, t in sorted(results.items(), key=lambda r: r[1])}
    config = min(results, key=results.__getitem__)
    return config, results[config]


@triton.jit
def _read_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(tl.load(x_ptr + at)))


def measure_peak_rates() -> dict[str, float]:
    """Measure read bandwidth and matmul throughput, by unit."""
    x = random_tensor(1 << 30, dtype=BF16)
    y = torch.empty_like(x)
    # Not in a CUDA graph, where copies use another path that takes 1.5 times as long.
    copied = 2 * x.nbytes / triton.testing.do_bench(lambda: y.copy_(x), return_mode="median") / 1e6
    words = x.view(torch.int32)
    sums = torch.empty(len(words) // 8192, dtype=torch.int32, device=DEVICE)
    read = x.nbytes / time_launches([lambda: _read_kernel[(len(sums),)](words, sums, BLOCK=8192, num_warps=8)]) / 1e3
    a, b = random_tensor(8192, 8192), random_tensor(8192, 8192)
    product = 2 * 8192**3 / time_launches([lambda: a @ b]) / 1e6
    empty = torch.zeros(1, device=DEVICE)
    gap = time_launches([lambda: empty.add_(1)] * 200)
    print(f"copy {copied:.0f} GB/s, read {read:.0f} GB/s, matmul {product:.0f} TFLOP/s, launch in a graph {gap:.2f} µs")
    report["peak_rates"] = {"copy": copied, "read": read, "matmul": product, "launch_us": gap}
    return {"GB/s": read, "TFLOP/s": product}


class PagedCache:
    """A paged cache of random numbers, blocks in random order."""

    def __init__(self, lengths: list[int], kv_heads: int, size: int) -> None:
        counts = [-(-n // BLOCK) for n in lengths]
        self.tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        order = torch.randperm(sum(counts), dtype=torch.int32)
        for s, part in enumerate(order.split(counts)):
            self.tables[s, : len(part)] = part
        self.tables = self.tables.to(DEVICE)
        self.keys, self.values = (random_tensor(sum(counts), kv_heads, BLOCK, size) for _ in range(2))
        self.lengths = int_tensor(lengths)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.keys, self.values, self.tables, self.lengths

    def last_slots(self) -> torch.Tensor:
        """Return the slot of each sequence's last token."""
        at = (self.lengths - 1).long()
        return self.tables.gather(1, (at // BLOCK)[:, None])[:, 0].long() * BLOCK + at % BLOCK


def rotary_tables(length: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine tables, `[length, size / 2]`."""
    frequencies = 1e6 ** (-torch.arange(0, size, 2, device=DEVICE) / size)
    angles = torch.arange(length, device=DEVICE)[:, None] * frequencies
    return angles.cos(), angles.sin()
