from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.ops.fp8 import FP8_DTYPE, Fp8Linear, quantize_fp8
from tests.engine.gpu.kernel_inputs import random, relative_error


def test_quantize_fp8_scales_rows_independently() -> None:
    x = random(6, 512) * torch.tensor([1e-4, 1.0, 300.0, 0.0, 1.0, 1.0])[:, None]
    x[4, 3] = 1e4  # an outlier costs the precision of its own row only
    rows, scale = quantize_fp8(x)
    assert rows.dtype == FP8_DTYPE
    restored = rows.float() * scale
    for i in (0, 1, 2, 5):
        assert relative_error(restored[i], x[i]) < 0.03
    assert not restored[3].any()
    assert restored[4, 3] == pytest.approx(1e4, rel=0.04)


@pytest.mark.parametrize("rows", [1, 7])
def test_fp8_linear_is_close_to_exact(rows: int) -> None:
    weight, bias, x = random(96, 512, seed=1), random(96, seed=2), random(rows, 512, seed=3)
    exact = x @ weight.T + bias
    result = Fp8Linear(weight, bias)(x)
    assert 0 < relative_error(result, exact) < 0.05
