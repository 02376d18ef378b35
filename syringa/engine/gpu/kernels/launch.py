# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Programmatic dependent launch (PDL) and the workspace that kernels share.

A kernel launched with `pdl` may start while the previous one still runs (Hopper and newer). It must call `pdl_wait`
before it reads what earlier kernels wrote or writes what they read; weights may be loaded before. Every program of
every kernel in such a chain must wait, otherwise the kernel after the next could overtake. `pdl_launch_dependents` lets
the next kernel start; it is called early, because that kernel waits by itself.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PROCESSORS = 132  # of an H200, on which tile sizes were measured
LARGE_SHARED_MEMORY = 200 << 10
OTHER_SHARED_MEMORY = 3 << 10  # for scales, barriers and reductions


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until all earlier kernels have completed."""
    if PDL:
        gdc_wait()


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Allow the next kernel to start."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def prefetch_l2(pointers, mask, PDL: tl.constexpr):
    """Prefetch cache lines into L2 without waiting for them. Only useful before `pdl_wait`."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
            "=r,l,r",
            [pointers.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


def pdl_options(pdl: bool) -> dict[str, bool]:
    """Return the launch keywords. Triton's interpreter does not know `launch_pdl`, so it is passed only when set."""
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@cache
def num_processors() -> int:
    """Return the number of multiprocessors of the GPU; without one, `PROCESSORS`."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else PROCESSORS


@cache
def shared_memory() -> int:
    """Return the bytes of shared memory that a program may use; 0: no GPU, or not known."""
    if not torch.cuda.is_available():
        return 0
    size: int = getattr(torch.cuda.get_device_properties(), "shared_memory_per_block_optin", 0)
    return size


def has_large_shared_memory() -> bool:
    """Return whether a program may use 200 KiB of shared memory: GPUs of data centers from Hopper on."""
    return shared_memory() >= LARGE_SHARED_MEMORY


@cache
def loads_descriptors_ahead() -> bool:
    """Return whether a loop loads the tiles of tensor descriptors some iterations ahead: from Hopper on."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def fit_stages(stages: int, stage_bytes: int) -> int:
    """Return how many iterations of `stage_bytes` can be in flight, at most `stages`.

    The configurations were chosen for Hopper, where all fit. Other GPUs keep one iteration less in shared memory than
    are in flight; those with 99 KiB have no room for some.
    """
    available = shared_memory()
    if not available or available >= LARGE_SHARED_MEMORY:
        return stages
    return max(1, min(stages, (available - OTHER_SHARED_MEMORY) // stage_bytes + 1))


_workspaces: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
_retained: list[tuple[torch.Tensor, torch.Tensor]] = []  # CUDA graphs may still reference outgrown ones


def get_workspace(device: torch.device, num_floats: int, num_counters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a workspace of fp32 numbers, and int32 counters that every launch finds and leaves at zero.

    All launches share it, so they must be on one stream. Request it before a graph is captured (running the kernels
    once does): counters allocated during a capture would only be zeroed when the graph is replayed.
    """
    partials, counters = _workspaces.get(device, (None, None))
    if partials is None or counters is None or len(partials) < num_floats or len(counters) < num_counters:
        partials = torch.empty(max(num_floats, 1 << 22), dtype=torch.float32, device=device)
        counters = torch.zeros(max(num_counters, 1 << 14), dtype=torch.int32, device=device)
        _retained.append((partials, counters))
        _workspaces[device] = partials, counters
    return partials, counters
