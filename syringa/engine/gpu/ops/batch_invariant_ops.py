"""`GpuOps` whose results for a row do not depend on the other rows of the step (`--deterministic`).

Norms, rotation, the MLP gate, sampling and prefill attention compute row by row anyway. Matmuls and decode attention,
which are otherwise split by batch size, are replaced here.
"""

from __future__ import annotations

import torch

from syringa.engine.gpu.kernels.batch_invariant_attention import batch_invariant_decode_attention
from syringa.engine.gpu.kernels.batch_invariant_matmul import batch_invariant_matmul
from syringa.engine.gpu.ops.base import QKNormRope
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.gpu.packed_weight import Fp8Rows, PackedWeight


class BatchInvariantOps(TritonOps):
    """Triton kernels with a fixed summation order for every row."""

    max_fused_rows = 0  # never the fused path, which rounds at other places
    reads_new_keys = False  # the order of keys would depend on where a step begins
    positions: torch.Tensor | None = None  # of the step's decode rows, computed by its first layer

    def begin_step(self, rows: int, decode_only: bool) -> None:
        super().begin_step(rows, decode_only)
        self.positions = None

    def matmul(
        self, x: torch.Tensor | Fp8Rows, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        assert isinstance(weight, torch.Tensor)  # quantized weights are refused before
        return batch_invariant_matmul(x, weight, bias, pdl=self.pdl)

    def compute_logits(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return batch_invariant_matmul(x, weight, out=out, pdl=self.pdl)

    def decode_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        heads: int,
        window: int,
        store: tuple[torch.Tensor, QKNormRope] | None,
        out: torch.Tensor | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        if store is not None:
            if self.positions is None:
                self.positions = (lengths - 1).clamp(min=0)
            slots, qk_norm_rope = store
            self.rotate_and_store(qkv, self.positions, slots, qk_norm_rope, keys, values, heads)
        return batch_invariant_decode_attention(
            qkv,
            keys,
            values,
            tables,
            lengths,
            heads,
            window=window,
            scale=scale,
            sinks=sinks,
            softcap=softcap,
            out=out,
            pdl=self.pdl,
        )
