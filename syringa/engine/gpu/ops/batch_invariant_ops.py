"""The operations of a decoder whose results for a row do not depend on the rows beside it: `ops.Ops` for a GPU.

Norms, rotation, the gate and drawing take a row at a time anyway, and prompts' attention a row of a tile. The rest is
here: products and the attention of single tokens, which otherwise are divided up by how many there are.
"""

from __future__ import annotations

import torch

from syringa.engine.gpu.kernels.batch_invariant_attention import row_attention
from syringa.engine.gpu.kernels.batch_invariant_matmul import product
from syringa.engine.gpu.ops.base import Turning
from syringa.engine.gpu.ops.triton_ops import TritonOps


class SteadyOps(TritonOps):
    narrow_rows = 0  # one way for all: the narrow one rounds elsewhere
    positions: torch.Tensor | None = None  # of the step's single tokens, once they are known

    def begin(self, rows: int, alike: bool) -> None:
        super().begin(rows, alike)
        self.positions = None

    def product(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return product(x, weight, bias, pdl=self.pdl)

    def head(self, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return product(x, weight, out=out, pdl=self.pdl)

    def decode_attention(
        self,
        qkv: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        lengths: torch.Tensor,
        heads: int,
        window: int,
        store: tuple[torch.Tensor, Turning] | None,
        out: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> torch.Tensor:
        if store is not None:
            if self.positions is None:
                self.positions = (lengths - 1).clamp(min=0)
            slots, turning = store
            self.rotate_and_store(qkv, self.positions, slots, turning, keys, values, heads)
        return row_attention(
            qkv, keys, values, tables, lengths, heads, window=window, scale=scale, out=out, pdl=self.pdl
        )
