"""The decoder with weights in FP8 and more rows than its fused path takes, by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.gpu import packed_weight
from syringa.engine.gpu.decoder import GpuExperts
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.ops.quantized_linear import FUSED_ROWS, multiplies_fp8_rows, quantize_for
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.gpu.packed_weight import Fp8Rows, PackedWeight
from tests.engine.gpu.kernel_inputs import dequantize_rows
from tests.engine.gpu.tiny_models import load_stored_gpu_model
from tests.engine.loading import quantized_folders
from tests.engine.loading.quantized_folders import LAYOUTS, quantize_folder
from tests.engine.loading.quantized_folders import LINEAR as LINEAR_PATTERN
from tests.engine.models.hybrid_models import FULL, LINEAR, make_config, save_hybrid
from tests.engine.models.tiny_models import SIZES, difference, run, save

LENGTHS = (3, FUSED_ROWS - 2)  # of prompts; the number of their rows is not a multiple of four
LAST_ROWS = [2, sum(LENGTHS) - 1]
SMALL: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
HYBRID = SMALL | {  # the input projection of its delta net has a multiple of 16 outputs, as cuBLAS needs
    "layer_types": [FULL, LINEAR],
    "linear_num_value_heads": 8,
}
ALL_PROJECTIONS = LINEAR_PATTERN.replace("_z)", "_z|_a|_b)")  # those of a delta net's small gates, too


class CountingOps(TritonOps):
    """Counts the results that are quantized by the kernel that computes them."""

    count = 0

    def add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        consumer: torch.Tensor | PackedWeight | None = None,
    ) -> torch.Tensor | Fp8Rows:
        y = super().add_rms_norm(x, residual, weight, eps, consumer)
        self.count += isinstance(y, Fp8Rows)
        return y

    def silu_mul(
        self, gate_up: torch.Tensor, consumer: torch.Tensor | PackedWeight | None = None
    ) -> torch.Tensor | Fp8Rows:
        y = super().silu_mul(gate_up, consumer)
        self.count += isinstance(y, Fp8Rows)
        return y


class RoundingReference(ReferenceOps):
    """Rounds rows to FP8 where the kernels do, as the interpreter rounds: it truncates."""

    def matmul(
        self, x: torch.Tensor | Fp8Rows, weight: torch.Tensor | PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        if isinstance(weight, PackedWeight) and multiplies_fp8_rows(len(x), weight):
            rows = quantize_for(x, weight)
            x = dequantize_rows(rows.values, rows.scales, weight.row_group)[: rows.rows]
        return super().matmul(x, weight, bias)


def make_prompts(*lengths: int) -> list[list[int]]:
    return [[(7 * i + j) % SIZES["vocab_size"] for i in range(length)] for j, length in enumerate(lengths)]


def count_quantized(folder: Path, lengths: tuple[int, ...] = LENGTHS, **options: Any) -> int:
    """Return how many results are quantized by the kernel that computes them. `options`: of `run`.

    Compare the logits with those of rows that are quantized right before a product.
    """
    counting = CountingOps()
    expected, found = (
        torch.cat(run(load_stored_gpu_model(folder, ops), make_prompts(*lengths), **options))
        for ops in (RoundingReference(), counting)
    )
    assert difference(found, expected) < 0.01  # a number between two of FP8 may be rounded to either
    return counting.count


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """Stands in for `torch._scaled_mm`."""

    def dequantize(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        rows, columns = (size // groups for size, groups in zip(values.shape, scales.shape, strict=True))
        return values.float() * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)

    return (dequantize(a, scale_a) @ dequantize(b, scale_b)).to(out_dtype)


@pytest.fixture
def few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """All products of rows in FP8 have few tiles: cuBLAS, which needs a GPU, has none."""
    monkeypatch.setattr(torch, "_scaled_mm", None)


@pytest.mark.usefixtures("few_tiles")
def test_rows_are_quantized_by_the_kernels_before_a_product(tmp_path: Path) -> None:
    save(tmp_path, AutoConfig.for_model("qwen3", **(SIZES | SMALL)))
    quantize_folder(tmp_path, "fp8 channel")
    # In the first layer before gate and up, and before down; in the second one before qkv: it has two rows after that.
    assert count_quantized(tmp_path, rows=LAST_ROWS) == 3


@pytest.mark.usefixtures("few_tiles")
def test_rows_are_quantized_in_steps_with_decode_and_prefill_rows(tmp_path: Path) -> None:
    save(tmp_path, AutoConfig.for_model("qwen3", **(SIZES | SMALL | {"num_hidden_layers": 1})))
    quantize_folder(tmp_path, "fp8 channel")
    # The second step has one row of the first sequence. All rows have logits: both steps have two places.
    assert count_quantized(tmp_path, (FUSED_ROWS + 1, 2 * FUSED_ROWS), chunk=FUSED_ROWS) == 2 * 2


def test_rows_have_a_scale_per_block_if_the_weights_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_folders, "GROUP", 128)
    monkeypatch.setitem(LAYOUTS, "fp8 blocks", LAYOUTS["fp8 blocks"] | {"weight_block_size": [128, 128]})
    monkeypatch.setattr(packed_weight, "multiplies_blocks", lambda device: True)  # as on Hopper
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    sizes = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}
    save(tmp_path, AutoConfig.for_model("qwen3", **(SIZES | SMALL | sizes)))
    quantize_folder(tmp_path, "fp8 blocks")
    assert count_quantized(tmp_path, rows=LAST_ROWS) == 3


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(("pattern", "count"), [(ALL_PROJECTIONS, 3), (LINEAR_PATTERN, 2)], ids=["all", "not b and a"])
def test_rows_of_a_delta_net_are_quantized_if_all_its_projections_are(tmp_path: Path, pattern: str, count: int) -> None:
    """In the first layer before gate and up, and before down, and in the second before the delta net."""
    save_hybrid(tmp_path, make_config("qwen3_5", **HYBRID))
    quantize_folder(tmp_path, "fp8 channel", pattern=pattern)
    decoder: Any = load_stored_gpu_model(tmp_path).model.decoder  # type: ignore[attr-defined]
    assert (decoder.layers[1].gates is None) == (pattern == ALL_PROJECTIONS)
    assert count_quantized(tmp_path, rows=LAST_ROWS) == count


@pytest.mark.usefixtures("few_tiles")
def test_rows_of_a_shared_expert_are_quantized_after_its_gate_only(tmp_path: Path) -> None:
    """The router and the other experts take the normalized rows as they are."""
    save_hybrid(tmp_path, make_config("qwen3_5_moe", **HYBRID))
    quantize_folder(tmp_path, "fp8 channel", pattern=rf"(attn|shared_expert){LINEAR_PATTERN}")
    decoder: Any = load_stored_gpu_model(tmp_path).model.decoder  # type: ignore[attr-defined]
    assert all(isinstance(layer.mlp, GpuExperts) and layer.mlp.shared_mlp for layer in decoder.layers)
    # In the first layer before the shared expert's down; its next layer takes rows for b and a, too.
    assert count_quantized(tmp_path, rows=LAST_ROWS) == 1
