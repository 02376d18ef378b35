# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Embedding lookup for tokens that the host knows, or that the previous step sampled and only the device knows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait


@triton.jit
def _embed_kernel(
    table_ptr,
    tokens_ptr,
    sources_ptr,
    sampled_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)
    source = tl.load(sources_ptr + row)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    if source >= 0:
        token = tl.load(sampled_ptr + source)
    token = tl.maximum(token, 0)  # a row without a sampled token is computed like any other and discarded later
    x = tl.load(table_ptr + token * WIDTH + at, at < WIDTH, 0.0)
    tl.store(out_ptr + row * WIDTH + at, x, at < WIDTH)


def embed(
    table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, sampled: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """Return `[rows, width]`. `tokens`, `sources`: int32; for a non-negative source the token is `sampled[source]`."""
    width = table.shape[1]
    out = table.new_empty(len(tokens), width)
    block = min(triton.next_power_of_2(width), 1024)
    _embed_kernel[(len(tokens), triton.cdiv(width, block))](
        table, tokens, sources, sampled, out, WIDTH=width, BLOCK=block, num_warps=4, **pdl_options(pdl)
    )
    return out
