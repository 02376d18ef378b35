"""FlashInfer's attention next to the Triton kernels, for `bench.gpu_kernels`: accuracy, batch invariance and speed."""

# ruff: noqa: B023
from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from bench.kernel_harness import (
    BF16,
    BLOCK,
    DEVICE,
    PagedCache,
    add_row,
    check,
    check_deterministic_gpu,
    copies_beyond_l2,
    failures,
    int_tensor,
    nan_tensor,
    random_tensor,
    report,
    rotary_tables,
    time_launches,
)
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.kernels.decode_attention import NewTokens, decode_attention
from syringa.engine.gpu.kernels.prefill_attention import prefill_attention, query_tiles


class PrefillBatch:
    """Prefill rows of several sequences over one cache, for `FlashInferOps` and for the Triton kernel."""

    def __init__(self, ops: Any, heads: int, counts: list[int], first: list[int], size: int = 128) -> None:
        kv_heads = 8
        self.ops, self.heads, self.size, self.counts, self.first = ops, heads, size, counts, first
        self.cache = PagedCache([f + c for f, c in zip(first, counts, strict=True)], kv_heads, size)
        self.starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
        self.qkv = random_tensor(self.starts[-1], (heads + 2 * kv_heads) * size)
        self.layout = int_tensor(self.starts), int_tensor(first)
        self.tiles = query_tiles(self.starts, first).to(DEVICE)
        self.out = nan_tensor(self.starts[-1], heads * size)

    def flashinfer(self, window: int = 0, plan: bool = True) -> torch.Tensor:
        if plan:
            self.ops.plan_prefill(self.starts, self.first)
        inputs = *self.cache.tensors[:3], self.tiles, *self.layout
        return self.ops.prefill_attention(self.qkv, *inputs, self.heads, window, self.out)

    def triton(self, window: int = 0) -> torch.Tensor:
        inputs = *self.cache.tensors[:3], self.tiles, *self.layout
        return prefill_attention(self.qkv, *inputs, self.heads, window=window, out=self.out)

    def expected(self, window: int) -> torch.Tensor:
        q = self.qkv[:, : self.heads * self.size].unflatten(1, (self.heads, self.size))
        inputs = *self.cache.tensors[:3], *self.layout
        return reference.paged_attention(q, *inputs, window=window, dtype=torch.float64).flatten(1)

    def rows_of(self, sequence: int, low: int, high: int) -> PrefillBatch:
        """Return some rows of one sequence as a batch of its own."""
        batch = object.__new__(PrefillBatch)
        batch.__dict__.update(self.__dict__)
        begin = self.starts[sequence]
        batch.counts, batch.first = [high - low], [self.first[sequence] + low]
        batch.cache = object.__new__(PagedCache)
        batch.cache.__dict__.update(self.cache.__dict__)
        batch.cache.tables = self.cache.tables[sequence : sequence + 1]
        batch.starts = [0, high - low]
        batch.qkv = self.qkv[begin + low : begin + high]
        batch.layout = int_tensor(batch.starts), int_tensor(batch.first)
        batch.tiles = query_tiles(batch.starts, batch.first).to(DEVICE)
        batch.out = nan_tensor(high - low, self.heads * self.size)
        return batch


def check_batch_invariance(name: str, batch: PrefillBatch, run: Callable[[PrefillBatch], torch.Tensor]) -> None:
    """Check that a sequence's rows have the same bits alone and batched, and report whether also in chunks."""
    whole = run(batch).clone()
    alone = chunks = True
    for s, count in enumerate(batch.counts):
        mine = whole[batch.starts[s] : batch.starts[s + 1]]
        alone &= torch.equal(run(batch.rows_of(s, 0, count)), mine)
        cuts = sorted({0, count // 3, count // 2 + 5 if count > 20 else 0, count})
        chunks &= all(torch.equal(run(batch.rows_of(s, a, b)), mine[a:b]) for a, b in itertools.pairwise(cuts))
    print(f"{name}: same bits alone {alone}, in chunks {chunks}", flush=True)
    report.setdefault("bits", {})[name] = {"alone": alone, "in chunks": chunks}
    if not alone:
        failures.append(f"{name}: not batch-invariant")


def bench_flashinfer() -> None:
    """Compare FlashInfer's attention with the Triton kernels and PyTorch: accuracy, batch invariance and speed."""
    from syringa.engine.gpu.ops.flashinfer_ops import FlashInferOps, missing_flashinfer

    if (reason := missing_flashinfer(torch.cuda.get_device_capability())) is not None:
        print("FlashInfer: " + reason)
        return
    ops = FlashInferOps(required=True)
    counts, first = [257, 300, 1, 128, 900, *range(31, 500, 31)], [0, 100, 333, 64, 700, *range(0, 512, 32)]
    for heads, window in ((32, 0), (16, 0), (32, 100), (16, 1000)):
        prefill = PrefillBatch(ops, heads, counts, first)
        check("flashinfer prefill", prefill.flashinfer(window), prefill.expected(window), 1e-2)
        check_deterministic_gpu("flashinfer prefill", lambda: prefill.flashinfer(window))
        check_batch_invariance(f"flashinfer {heads}/8 window {window}", prefill, lambda p: p.flashinfer(window))
    for heads, batch, count, earlier in (
        (32, 4, 2000, 0), (32, 1, 8192, 0), (32, 14, 580, 0), (32, 2, 2048, 6144), (16, 4, 2000, 0), (16, 1, 8192, 0),
        (16, 14, 580, 0), (16, 2, 2048, 6144),
    ):  # fmt: skip
        prefill = PrefillBatch(ops, heads, [count] * batch, [earlier] * batch)
        prefill.flashinfer()
        work = 4 * heads * prefill.size * batch * count * (earlier + (count + 1) / 2)
        us, triton_us = time_launches([lambda: prefill.flashinfer(plan=False)]), time_launches([prefill.triton])
        comparison = f"triton {triton_us:.1f}"
        if not earlier:
            a, b, c = (random_tensor(batch, h, count, prefill.size) for h in (heads, 8, 8))
            library = time_launches([lambda: F.scaled_dot_product_attention(a, b, c, is_causal=True, enable_gqa=True)])
            comparison += f", SDPA {library:.1f}"
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            prefill.flashinfer()
        host = (time.perf_counter() - start) / 10 * 1e6
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            prefill.flashinfer(plan=False)
        again = (time.perf_counter() - start) / 10 * 1e6
        torch.cuda.synchronize()
        add_row(
            f"flashinfer {heads}/8 {batch}x{count}+{earlier}",
            us,
            work,
            "TFLOP/s",
            comparison,
            f"host {host:.0f}, {again:.0f}",
        )
    for heads, batch, length in ((32, 64, 540), (32, 256, 540), (32, 256, 1024), (16, 64, 540), (16, 256, 540)):
        compare_decode(ops.library, heads, batch, length)
    prefill = PrefillBatch(ops, 32, counts, first)
    check_batch_invariance("triton 32/8", prefill, lambda p: p.triton())


def compare_decode(library: Any, heads: int, batch: int, length: int) -> None:
    """Compare decode attention. The Triton kernel also normalizes, rotates and stores the new token."""
    size, read = 128, 2 * batch * length * 8 * 128 * 2
    caches = [PagedCache([length] * batch, 8, size) for _ in range(min(4, copies_beyond_l2(read)))]
    qkv, out = random_tensor(batch, (heads + 16) * size), nan_tensor(batch, heads * size)
    q = qkv[:, : heads * size].unflatten(1, (heads, size)).contiguous()
    rotary, norms = (
        rotary_tables(length, size),
        (random_tensor(size, dtype=torch.float32), random_tensor(size, dtype=torch.float32)),
    )
    new_tokens = [NewTokens(c.last_slots(), rotary, norms, 1e-6) for c in caches]
    pages = -(-length // BLOCK)
    wrappers = []
    for c in caches:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE), "HND", use_tensor_cores=True, backend="fa2"
        )
        starts = torch.arange(batch + 1, dtype=torch.int32) * pages
        last = torch.full((batch,), (length - 1) % BLOCK + 1, dtype=torch.int32)
        pages_of = c.tables[:, :pages].reshape(-1)
        wrapper.plan(starts, pages_of, last, heads, 8, size, BLOCK, q_data_type=BF16, kv_data_type=BF16)
        wrappers.append(wrapper)
    flashinfer_us = time_launches(
        [lambda c=c, w=w: w.run(q, (c.keys, c.values)) for c, w in zip(caches, wrappers, strict=True)]
    )
    triton_us = time_launches(
        [
            lambda c=c, new=new: decode_attention(qkv, *c.tensors, heads, new=new, out=out)
            for c, new in zip(caches, new_tokens, strict=True)
        ]
    )
    add_row(f"flashinfer decode {heads}/8 {batch}x{length}", flashinfer_us, read, "GB/s", f"triton {triton_us:.1f}")
