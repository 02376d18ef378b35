"""Prompts' attention by FlashInfer, on a Hopper GPU where it is installed; the rest as `triton_ops` has it.

Of its kernels this takes the one that was made for Hopper ("fa3"). There a tile of rows walks over its keys in rounds
of a fixed size, alone, so a row's bits do not depend on what else is in the step. The others choose tiles by the batch
or split the keys. Its decode attention is not used: ours stores the new token along the way.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.gpu.transfer import upload
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.errors import ConfigError

logger = logging.getLogger("syringa.worker")

HOPPER = 9  # compute capability; the kernel uses instructions that only these have
SIZES = (64, 128, 256)  # of heads
KINDS = (torch.bfloat16, torch.float16)
ROWS = 128  # of a tile, at the least
PLAN_BYTES = 8 << 20  # that FlashInfer keeps for a plan
TILE_BYTES = 32  # that a tile takes of them, rounded up
SCRATCH = 1 << 20  # it asks for some; this kernel uses none of it
NO_BUILDING = "FLASHINFER_DISABLE_JIT"  # looked for whenever it has not got a kernel


def missing(capability: tuple[int, int]) -> str | None:
    """Why FlashInfer's attention cannot be used; None: it can."""
    if capability[0] != HOPPER:
        return f"it needs a Hopper GPU (9.0), and this one has compute capability {capability[0]}.{capability[1]}"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'syringa[flashinfer]'"
    return None


class Shape(NamedTuple):
    """Of a layer's attention: layers that are alike share a plan."""

    heads: int
    kv_heads: int
    size: int
    window: int
    scale: float
    dtype: torch.dtype

    @property
    def supported(self) -> bool:
        return self.size in SIZES and self.dtype in KINDS


class Step:
    """The rows of a step, on the host, by FlashInfer's names."""

    def __init__(self, starts: Sequence[int], first: Sequence[int]) -> None:
        self.qo_indptr = np.array(starts, dtype=np.int32)
        counts = np.diff(self.qo_indptr)
        self.seq_lens = np.array(first, dtype=np.int32) + counts
        self.pages = -(-self.seq_lens // BLOCK_SIZE)
        self.kv_indptr = np.concatenate([[0], self.pages.cumsum()]).astype(np.int32)
        self.last_page_len = self.seq_lens - (self.pages - 1) * BLOCK_SIZE
        self.tiles = int((-(-counts // ROWS)).sum())
        self._indices: torch.Tensor | None = None

    def indices(self, tables: torch.Tensor) -> torch.Tensor:
        """The sequences' blocks one after the other, on the device. The host does not have `tables`."""
        if self._indices is None:
            shifts = np.arange(len(self.pages)) * tables.shape[1] - self.kv_indptr[:-1]
            places = np.repeat(shifts, self.pages) + np.arange(self.kv_indptr[-1])
            (index,) = upload([places.astype(np.int32)], tables.device)
            self._indices = tables.reshape(-1).index_select(0, index)
        return self._indices


class Plan:
    """FlashInfer's wrapper for layers of one shape."""

    def __init__(self, library: ModuleType, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        scratch = torch.empty(SCRATCH, dtype=torch.uint8, device=device)
        self.wrapper: Any = library.BatchPrefillWithPagedKVCacheWrapper(scratch, kv_layout="HND", backend="fa3")
        self._step: Step | None = None
        self._sent: torch.cuda.Event | None = None

    def follow(self, step: Step, tables: torch.Tensor) -> None:
        """Plans the step, once for all layers. Nothing waits for the device but for the last plan to have left."""
        if step is self._step:
            return
        if self._sent is not None:
            self._sent.synchronize()  # it goes by a buffer on the host, which is about to be written again
        shape = self.shape
        self.wrapper.plan(
            self._host(step.qo_indptr),
            self._host(step.kv_indptr),
            step.indices(tables),
            self._host(step.last_page_len),
            shape.heads,
            shape.kv_heads,
            shape.size,
            BLOCK_SIZE,
            causal=True,
            sm_scale=shape.scale,
            window_left=shape.window - 1,  # those before the row; -1: all
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            seq_lens=self._host(step.seq_lens),
        )
        if self.device.type == "cuda":
            self._sent = torch.cuda.Event()
            self._sent.record()
        self._step = step

    def _host(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


class FlashInferOps(TritonOps):
    """`required`: kernels that FlashInfer does not bring along are compiled, which takes minutes, and it is an error if
    they cannot be. Else they are a reason to use ours."""

    def __init__(self, *, required: bool = False) -> None:
        super().__init__()
        self.required = required
        self.library = import_module("flashinfer")
        self.plans: dict[Shape, Plan | None] = {}  # None: ours
        self._step: Step | None = None

    def tiles(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        self._step = Step(starts, first) if len(first) else None
        return super().tiles(starts, first)

    def prefill_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        tiles: torch.Tensor,
        starts: torch.Tensor,
        first: torch.Tensor,
        heads: int,
        window: int,
        out: torch.Tensor,
        scale: float | None = None,
    ) -> torch.Tensor:
        _, kv_heads, _, size = keys.shape
        shape = Shape(heads, kv_heads, size, window, size**-0.5 if scale is None else scale, keys.dtype)
        plan = self._plan(shape, tables)
        if plan is None:
            return super().prefill_attention(qkv, keys, values, tables, tiles, starts, first, heads, window, out, scale)
        q, result = (rows[:, : heads * size].unflatten(1, (heads, size)) for rows in (qkv, out))
        plan.wrapper.run(q, (keys, values), out=result, enable_pdl=False)
        return out

    def _plan(self, shape: Shape, tables: torch.Tensor) -> Plan | None:
        """That of this step; None where our kernel has to do."""
        step = self._step
        if step is None or step.tiles * shape.heads * TILE_BYTES > PLAN_BYTES:
            return None
        if shape not in self.plans:
            self.plans[shape] = self._prepare(shape, step, tables)
        plan = self.plans[shape]
        if plan is not None:
            plan.follow(step, tables)
        return plan

    def _prepare(self, shape: Shape, step: Step, tables: torch.Tensor) -> Plan | None:
        """When a model is loaded."""
        if not shape.supported:
            kind = str(shape.dtype).removeprefix("torch.")
            logger.info("FlashInfer has no attention for heads of %d in %s: ours is used", shape.size, kind)
            return None
        if self.required:
            logger.info("preparing FlashInfer's attention for heads of %d: the first time, it is compiled", shape.size)
        try:
            with contextlib.nullcontext() if self.required else _as_it_is():
                plan = Plan(self.library, shape, tables.device)
                plan.follow(step, tables)
        except Exception as error:  # what a build can fail of has no end
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0].rstrip(".:")
            if self.required:
                raise ConfigError(
                    f"--attention flashinfer: its kernel could not be built, which needs CUDA's nvcc and ninja "
                    f"({reason}): see to that, or use --attention triton"
                ) from error
            logger.warning(
                "FlashInfer's attention is not ready for use (%s): ours is used. --attention flashinfer compiles it",
                reason,
            )
            return None
        return plan


@contextlib.contextmanager
def _as_it_is() -> Iterator[None]:
    """Inside, FlashInfer compiles nothing, and fails instead."""
    before = os.environ.get(NO_BUILDING)
    os.environ[NO_BUILDING] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[NO_BUILDING]
        else:
            os.environ[NO_BUILDING] = before
