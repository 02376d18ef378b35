from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.ops.fp8 import KIND, Fp8Product, quantized
from tests.engine.gpu.paged import distance, random


def test_rows_keep_their_scale() -> None:
    x = random(6, 512) * torch.tensor([1e-4, 1.0, 300.0, 0.0, 1.0, 1.0])[:, None]
    x[4, 3] = 1e4  # what stands out takes the rest's precision, of its own row only
    rows, scale = quantized(x)
    assert rows.dtype == KIND
    back = rows.float() * scale
    for i in (0, 1, 2, 5):
        assert distance(back[i], x[i]) < 0.03
    assert not back[3].any()
    assert back[4, 3] == pytest.approx(1e4, rel=0.04)


@pytest.mark.parametrize("rows", [1, 7])
def test_a_product_is_near_the_exact_one(rows: int) -> None:
    weight, bias, x = random(96, 512, seed=1), random(96, seed=2), random(rows, 512, seed=3)
    exact = x @ weight.T + bias
    found = Fp8Product(weight, bias)(x)
    assert 0 < distance(found, exact) < 0.05
