# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""The way into the decoder: rows of the embedding, of tokens that the host knows or that were only just drawn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import overlap, release, wait


@triton.jit
def _embed_kernel(
    table_ptr,
    tokens_ptr,
    sources_ptr,
    drawn_ptr,
    out_ptr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    release(PDL)
    wait(PDL)
    source = tl.load(sources_ptr + row)
    token = tl.load(tokens_ptr + row).to(tl.int64)
    if source >= 0:
        token = tl.load(drawn_ptr + source)
    token = tl.maximum(token, 0)  # what could not be drawn is computed as any other, and thrown away
    x = tl.load(table_ptr + token * WIDTH + at, at < WIDTH, 0.0)
    tl.store(out_ptr + row * WIDTH + at, x, at < WIDTH)


def embed(
    table: torch.Tensor, tokens: torch.Tensor, sources: torch.Tensor, drawn: torch.Tensor, *, pdl: bool = False
) -> torch.Tensor:
    """`[rows, width]`. `tokens`, `sources`: int32; where a source is not negative, the token is `drawn[source]`."""
    width = table.shape[1]
    out = table.new_empty(len(tokens), width)
    block = min(triton.next_power_of_2(width), 1024)
    _embed_kernel[(len(tokens), triton.cdiv(width, block))](
        table, tokens, sources, drawn, out, WIDTH=width, BLOCK=block, num_warps=4, **overlap(pdl)
    )
    return out
