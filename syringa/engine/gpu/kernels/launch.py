# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""What launches share: overlap with the kernel before, and room for parts that several programs add up.

A kernel that is launched with `pdl` may begin while the one before it still runs (programmatic dependent launch, from
Hopper on). It must then `wait` before it reads what others wrote, or writes what they read; weights may be fetched
before. Every program of every kernel in such a chain waits, else the kernel after the next could overtake. `release`
lets the next kernel begin: early, because it waits by itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch(at, mask, PDL: tl.constexpr):
    """Asks for the cache lines at these addresses without waiting for them. Only worth it before `wait`."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [at.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def overlap(pdl: bool) -> dict[str, bool]:
    """The launch's keywords. The interpreter knows nothing of `launch_pdl`, so it is named only when asked for."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


_current: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
_outgrown: list[tuple[torch.Tensor, torch.Tensor]] = []  # captured graphs may still point to these


def scratch(device: torch.device, cells: int, counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for `cells` numbers (fp32), and counters (int32) that every launch finds and leaves at zero.

    Launches share it, so they must follow each other on one stream. Ask once before a graph is captured, as compiling
    the kernels makes you do anyway: what is made during a capture is first zeroed when the graph runs.
    """
    parts, arrivals = _current.get(device, (None, None))
    if parts is None or arrivals is None or len(parts) < cells or len(arrivals) < counters:
        parts = torch.empty(max(cells, 1 << 22), dtype=torch.float32, device=device)
        arrivals = torch.zeros(max(counters, 1 << 14), dtype=torch.int32, device=device)
        _outgrown.append((parts, arrivals))
        _current[device] = parts, arrivals
    return parts, arrivals
