from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.kernels import elementwise, reference
from tests.engine.gpu.paged import CUT, EXACT, distance, poisoned, random

kinds = pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, EXACT), (torch.bfloat16, CUT)])


@kinds
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 96), (5, 576)])
def test_rms_norm(rows: int, width: int, dtype: torch.dtype, limit: float) -> None:
    x, weight = random(rows, width, dtype=dtype), random(width, seed=1)
    out = elementwise.rms_norm(x, weight, 1e-2, poisoned(rows, width, dtype=dtype))
    assert distance(out, reference.rms_norm(x.double(), weight, 1e-2, torch.float64)) < limit


def test_rms_norm_of_rows_that_lie_apart() -> None:
    wide, weight = random(4, 200), random(80, seed=1)
    out = elementwise.rms_norm(wide[:, 40:120], weight, 1e-5)
    assert distance(out, reference.rms_norm(wide[:, 40:120], weight, 1e-5)) < EXACT


@kinds
def test_the_residual_takes_the_sum_and_the_norm_is_of_that(dtype: torch.dtype, limit: float) -> None:
    x, residual, weight = random(3, 96, dtype=dtype), random(3, 96, seed=1, dtype=dtype), random(96, seed=2)
    expected_residual = residual.clone()
    expected = reference.add_rms_norm(x, expected_residual, weight, 1e-6)
    out = elementwise.add_rms_norm(x, residual, weight, 1e-6, poisoned(3, 96, dtype=dtype))
    assert distance(residual, expected_residual) < limit
    assert distance(out, expected) < limit


@kinds
@pytest.mark.parametrize(("rows", "width"), [(1, 64), (2, 1100), (3, 96)])
def test_silu_mul(rows: int, width: int, dtype: torch.dtype, limit: float) -> None:
    gate_up = random(rows, 2 * width, dtype=dtype)
    out = elementwise.silu_mul(gate_up, poisoned(rows, width, dtype=dtype))
    assert distance(out, reference.silu_mul(gate_up.double(), torch.float64)) < limit
