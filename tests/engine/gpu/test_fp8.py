from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.packed_weight import pack_fp8
from syringa.engine.loading.quantized import FP8_DTYPE, quantize_fp8
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


def test_fp8_weights_are_close_to_exact() -> None:
    weight, bias, x = random(96, 512, seed=1), random(96, seed=2), random(7, 512, seed=3)
    result = ReferenceOps().matmul(x, pack_fp8(weight), bias)
    assert 0 < relative_error(result, x @ weight.T + bias) < 0.05
