"""Prefill attention by FlashInfer on Hopper GPUs; everything else as in `triton_ops`.

Only the "fa3" backend is used. There a tile of rows iterates over its keys in steps of a fixed size, without splitting
them, so a row's bits do not depend on the rest of the step; the other backends choose tiles by batch or split the keys.
FlashInfer's decode attention is not used: the Triton kernel also stores the new token.
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

HOPPER = 9  # major compute capability; fa3 uses instructions that only Hopper has
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
TILE_ROWS = 128  # at least
PLAN_BYTES = 8 << 20  # FlashInfer's buffer for a plan
TILE_BYTES = 32  # of that buffer per tile, rounded up
WORKSPACE_BYTES = 1 << 20  # required by the constructor; fa3 uses none of it
DISABLE_JIT_VARIABLE = "FLASHINFER_DISABLE_JIT"  # read by FlashInfer when a kernel is not prebuilt


def missing_flashinfer(capability: tuple[int, int]) -> str | None:
    """Return why FlashInfer's attention cannot be used, or None if it can."""
    if capability[0] != HOPPER:
        return f"it needs a Hopper GPU (9.0), and this one has compute capability {capability[0]}.{capability[1]}"
    if find_spec("flashinfer") is None:
        return "FlashInfer is not installed: pip install 'syringa[flashinfer]'"
    return None


class FlashInferShape(NamedTuple):
    """The attention parameters of a layer. Layers with equal parameters share a plan."""

    heads: int
    kv_heads: int
    size: int
    window: int
    scale: float
    dtype: torch.dtype

    @property
    def supported(self) -> bool:
        return self.size in HEAD_DIMS and self.dtype in DTYPES


class FlashInferMetadata:
    """The layout of a step's prefill rows on the host, in FlashInfer's terms."""

    def __init__(self, starts: Sequence[int], first: Sequence[int]) -> None:
        self.qo_indptr = np.array(starts, dtype=np.int32)
        counts = np.diff(self.qo_indptr)
        self.seq_lens = np.array(first, dtype=np.int32) + counts
        self.pages = -(-self.seq_lens // BLOCK_SIZE)
        self.kv_indptr = np.concatenate([[0], self.pages.cumsum()]).astype(np.int32)
        self.last_page_len = self.seq_lens - (self.pages - 1) * BLOCK_SIZE
        self.tiles = int((-(-counts // TILE_ROWS)).sum())
        self._indices: torch.Tensor | None = None

    def indices(self, tables: torch.Tensor) -> torch.Tensor:
        """Return the blocks of all sequences, concatenated, on the device."""
        if self._indices is None:
            offsets = np.arange(len(self.pages)) * tables.shape[1] - self.kv_indptr[:-1]
            flat_indices = np.repeat(offsets, self.pages) + np.arange(self.kv_indptr[-1])
            (index,) = upload([flat_indices.astype(np.int32)], tables.device)
            self._indices = tables.reshape(-1).index_select(0, index)
        return self._indices


class FlashInferPlan:
    """A FlashInfer wrapper for layers of one shape."""

    def __init__(self, library: ModuleType, shape: FlashInferShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.wrapper: Any = library.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="HND", backend="fa3")
        self._step: FlashInferMetadata | None = None
        self._copied: torch.cuda.Event | None = None

    def plan_step(self, step: FlashInferMetadata, tables: torch.Tensor) -> None:
        """Plan a step, once for all layers of the shape. Waits only until the previous plan has been copied."""
        if step is self._step:
            return
        if self._copied is not None:
            self._copied.synchronize()  # FlashInfer copies from a host buffer that this call overwrites
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
            window_left=shape.window - 1,  # keys before the row; -1: all
            q_data_type=shape.dtype,
            kv_data_type=shape.dtype,
            seq_lens=self._host(step.seq_lens),
        )
        if self.device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record()
        self._step = step

    def _host(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


class FlashInferOps(TritonOps):
    """Triton kernels, with FlashInfer for prefill attention.

    With `required`, kernels that are not prebuilt are compiled, which takes minutes, and a failure is an error.
    Otherwise the Triton kernel is used where FlashInfer has no kernel ready.
    """

    def __init__(self, *, required: bool = False) -> None:
        super().__init__()
        self.required = required
        self.library = import_module("flashinfer")
        self.plans: dict[FlashInferShape, FlashInferPlan | None] = {}  # None: use the Triton kernel
        self._step: FlashInferMetadata | None = None

    def plan_prefill(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        self._step = FlashInferMetadata(starts, first) if len(first) else None
        return super().plan_prefill(starts, first)

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
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
        new_keys: bool = False,
    ) -> torch.Tensor:
        _, kv_heads, _, size = keys.shape
        shape = FlashInferShape(heads, kv_heads, size, window, size**-0.5 if scale is None else scale, keys.dtype)
        plan = None if sinks is not None or softcap else self._plan(shape, tables)
        if plan is None:
            return super().prefill_attention(
                qkv, keys, values, tables, tiles, starts, first, heads, window, out, scale, sinks, softcap, new_keys
            )
        q, result = (rows[:, : heads * size].unflatten(1, (heads, size)) for rows in (qkv, out))
        plan.wrapper.run(q, (keys, values), out=result, enable_pdl=False)
        return out

    def _plan(self, shape: FlashInferShape, tables: torch.Tensor) -> FlashInferPlan | None:
        """Return the plan of this step, or None if the Triton kernel has to be used."""
        step = self._step
        if step is None or step.tiles * shape.heads * TILE_BYTES > PLAN_BYTES:
            return None
        if shape not in self.plans:
            self.plans[shape] = self._prepare(shape, step, tables)
        plan = self.plans[shape]
        if plan is not None:
            plan.plan_step(step, tables)
        return plan

    def _prepare(self, shape: FlashInferShape, step: FlashInferMetadata, tables: torch.Tensor) -> FlashInferPlan | None:
        """Create the plan of a new shape, which happens while a model is loaded."""
        if not shape.supported:
            kind = str(shape.dtype).removeprefix("torch.")
            logger.info("FlashInfer has no attention kernel for head_dim=%d dtype=%s; using Triton", shape.size, kind)
            return None
        if self.required:
            logger.info("preparing FlashInfer attention head_dim=%d (compiled on first use)", shape.size)
        try:
            with contextlib.nullcontext() if self.required else _jit_disabled():
                plan = FlashInferPlan(self.library, shape, tables.device)
                plan.plan_step(step, tables)
        except Exception as error:  # a build can fail in any way
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0].rstrip(".:")
            if self.required:
                raise ConfigError(
                    f"--attention flashinfer: its kernel could not be built, which needs CUDA's nvcc and ninja "
                    f"({reason}): install them, or use --attention triton"
                ) from error
            logger.warning(
                "FlashInfer attention is not prebuilt (%s); using Triton. --attention flashinfer compiles it",
                reason,
            )
            return None
        return plan


@contextlib.contextmanager
def _jit_disabled() -> Iterator[None]:
    """Make FlashInfer fail instead of compiling a kernel."""
    before = os.environ.get(DISABLE_JIT_VARIABLE)
    os.environ[DISABLE_JIT_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[DISABLE_JIT_VARIABLE]
        else:
            os.environ[DISABLE_JIT_VARIABLE] = before
