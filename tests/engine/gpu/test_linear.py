from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.kernels import launch, reference
from syringa.engine.gpu.kernels.gemv import GemvConfig
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig
from syringa.engine.gpu.ops.linear import LinearConfig, choose_config, linear
from tests.engine.gpu.kernel_inputs import BF16_TOLERANCE, FP32_TOLERANCE, nan_filled, random, relative_error

GEMV_SINGLE = GemvConfig(outputs=4, inputs=128, warps=1)
GEMV_UNROLLED = GemvConfig(outputs=4, inputs=32, warps=1)
GEMV_PIPELINED = GemvConfig(outputs=4, inputs=32, warps=1, stages=2)
SKINNY = SkinnyConfig(outputs=16, inputs=32, warps=1, stages=2)
SKINNY_SPLIT_K = SkinnyConfig(outputs=16, inputs=32, warps=1, stages=2, splits=3)


@pytest.mark.parametrize("fused", ["plain", "bias", "residual", "gated", "all"])
@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (1, GEMV_SINGLE),
        (1, GEMV_UNROLLED),
        (2, GEMV_PIPELINED),
        (2, GEMV_UNROLLED),
        (5, SKINNY),
        (1, SKINNY_SPLIT_K),
        (17, SKINNY_SPLIT_K),
    ],
)
def test_linear_matches_reference(rows: int, config: LinearConfig, fused: str) -> None:
    inputs, outputs = 128, 30  # the last tile of outputs is partial
    gated = fused in ("gated", "all")
    x, weight = random(rows, inputs), random(outputs * (2 if gated else 1), inputs, seed=1) / 8
    bias = random(len(weight), seed=2) if fused in ("bias", "all") else None
    residual = random(rows, outputs, seed=3) if fused in ("residual", "all") else None
    norm_weight = random(inputs, seed=4) if fused == "all" and isinstance(config, GemvConfig) else None
    options = {"norm_weight": norm_weight, "eps": 1e-6, "gated": gated, "residual": residual}
    expected = reference.linear(x.double(), weight, bias, dtype=torch.float64, **options)  # type: ignore[arg-type]
    out = linear(x, weight, bias, out=nan_filled(rows, outputs), config=config, **options)  # type: ignore[arg-type]
    assert relative_error(out, expected) < FP32_TOLERANCE
    assert not launch.get_workspace(x.device, 0, 0)[1].any(), "a counter was not reset"


@pytest.mark.parametrize("config", [GEMV_UNROLLED, GEMV_PIPELINED, SKINNY, SKINNY_SPLIT_K])
def test_linear_with_partial_last_iteration(config: LinearConfig) -> None:
    x, weight = random(2, 100), random(8, 100, seed=1)
    out = linear(x, weight, out=nan_filled(2, 8), config=config)
    assert relative_error(out, reference.linear(x.double(), weight, dtype=torch.float64)) < FP32_TOLERANCE


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_linear_in_bf16(out: torch.dtype) -> None:
    x, weight = random(2, 128, dtype=torch.bfloat16), random(24, 128, seed=1, dtype=torch.bfloat16) / 8
    result = linear(x, weight, norm_weight=weight[0], eps=1e-6, config=GEMV_UNROLLED, out_dtype=out)
    expected = reference.linear(x, weight, norm_weight=weight[0], eps=1e-6, out_dtype=out)
    assert result.dtype == out
    assert relative_error(result, expected) < (BF16_TOLERANCE if out == torch.bfloat16 else FP32_TOLERANCE)


def test_linear_writes_residual_in_place() -> None:
    x, weight, residual = random(1, 64), random(8, 64, seed=1), random(1, 8, seed=2)
    expected = reference.linear(x, weight, residual=residual)
    assert linear(x, weight, residual=residual, out=residual, config=GEMV_UNROLLED) is residual
    assert relative_error(residual, expected) < FP32_TOLERANCE


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_linear_with_default_config_matches_reference(rows: int) -> None:
    x, weight = random(rows, 64), random(48, 64, seed=1) / 8
    norm_weight, residual = random(64, seed=2), random(rows, 24, seed=3)
    expected = reference.linear(x, weight, norm_weight=norm_weight, eps=1e-6, gated=True, residual=residual)
    assert (
        relative_error(linear(x, weight, norm_weight=norm_weight, eps=1e-6, gated=True, residual=residual), expected)
        < FP32_TOLERANCE
    )


def test_choose_config_by_rows() -> None:
    assert isinstance(choose_config(1, 4096, 4096, False), GemvConfig)
    assert isinstance(choose_config(16, 4096, 4096, False), SkinnyConfig)
    assert choose_config(65, 4096, 4096, False) is None


def test_linear_without_rows() -> None:
    """A step in the middle of a prompt may need no logits."""
    weight = random(8, 16)
    out = linear(weight.new_empty(0, 16), weight)
    assert out.shape == (0, 8)
