from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.kernels import elementwise, reference
from tests.engine.gpu.kernel_inputs import BF16_TOLERANCE, FP32_TOLERANCE, nan_filled, random, relative_error

dtypes = pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, FP32_TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)]
)


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 96), (5, 576)])
def test_rms_norm_matches_reference(rows: int, width: int, dtype: torch.dtype, limit: float) -> None:
    x, weight = random(rows, width, dtype=dtype), random(width, seed=1)
    out = elementwise.rms_norm(x, weight, 1e-2, nan_filled(rows, width, dtype=dtype))
    assert relative_error(out, reference.rms_norm(x.double(), weight, 1e-2, torch.float64)) < limit


def test_rms_norm_accepts_strided_rows() -> None:
    wide, weight = random(4, 200), random(80, seed=1)
    out = elementwise.rms_norm(wide[:, 40:120], weight, 1e-5)
    assert relative_error(out, reference.rms_norm(wide[:, 40:120], weight, 1e-5)) < FP32_TOLERANCE


@dtypes
def test_add_rms_norm_updates_residual_and_norms_the_sum(dtype: torch.dtype, limit: float) -> None:
    x, residual, weight = random(3, 96, dtype=dtype), random(3, 96, seed=1, dtype=dtype), random(96, seed=2)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    out = elementwise.add_rms_norm(x, residual, weight, 1e-6, nan_filled(3, 96, dtype=dtype))
    assert relative_error(residual, expected_residual) < limit
    assert relative_error(out, expected) < limit


@dtypes
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (2, 1100), (3, 96)])
@pytest.mark.parametrize("gate", ["silu_mul", "gelu_mul"])
def test_gates_match_reference(rows: int, width: int, dtype: torch.dtype, limit: float, gate: str) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype)
    out = getattr(elementwise, gate)(gate_up, nan_filled(rows, width, dtype=dtype))
    assert relative_error(out, getattr(reference, gate)(gate_up.double(), torch.float64)) < limit
