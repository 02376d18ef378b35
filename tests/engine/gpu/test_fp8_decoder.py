"""The decoder with weights in FP8 and more rows than its fused path takes, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.gpu.ops.quantized_linear import FUSED_ROWS
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.gpu.packed_weight import Fp8Rows, PackedWeight
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.tiny_models import SIZES, difference, run, save


class Quantizing(TritonOps):
    """Counts the results that were quantized by the kernel that computed them."""

    def __init__(self, *, fuse: bool) -> None:
        super().__init__()
        self.fuse, self.count = fuse, 0

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: torch.Tensor | PackedWeight | None = None,
    ) -> torch.Tensor | Fp8Rows:
        y = super().add_rms_norm(x, residual, weight, eps, consumer if self.fuse else None)
        self.count += isinstance(y, Fp8Rows)
        return y

    def silu_mul(
        self, gate_up: torch.Tensor, consumer: torch.Tensor | PackedWeight | None = None
    ) -> torch.Tensor | Fp8Rows:
        y = super().silu_mul(gate_up, consumer if self.fuse else None)
        self.count += isinstance(y, Fp8Rows)
        return y


def test_rows_are_quantized_by_the_kernels_before_a_product(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", None)  # all products have few tiles
    config = AutoConfig.for_model("qwen3", **(SIZES | {"num_hidden_layers": 2}))
    save(tmp_path, config)
    prompts = [[(7 * i + j) % SIZES["vocab_size"] for i in range(length)] for j, length in enumerate((40, FUSED_ROWS))]
    logits, counts = [], []
    for fuse in (False, True):
        ops = Quantizing(fuse=fuse)
        logits += run(load_tiny_gpu_model(tmp_path, "fp8", ops=ops), prompts, rows=[39, 39 + FUSED_ROWS])
        counts.append(ops.count)
    # In the first layer before gate and up, and before down; in the second one before qkv: it has two rows after that.
    assert counts == [0, 3]
    apart, fused = logits
    assert 0 < difference(fused, apart) < 0.05
