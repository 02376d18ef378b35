"""The compiled sampler compared with the PyTorch one."""

from __future__ import annotations

import pytest
import torch

from syringa.engine.cpu.layers.native_ops import NativeSampler
from syringa.engine.cpu.native import load_kernels
from syringa.engine.sampling.draw import draw_plain


@pytest.fixture(scope="module")
def draw() -> NativeSampler:
    kernels = load_kernels(2)
    if kernels is None:
        pytest.skip("the kernels were not built")
    return NativeSampler(kernels)


@pytest.mark.parametrize("size", [1, 7, 128, 1000, 49152])
def test_native_sampler_matches_draw_plain(draw: NativeSampler, size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(200, size) * 3
    temperatures = torch.rand(200) * 1.9 + 0.1
    uniforms = torch.rand(200, dtype=torch.float64)
    drawn, expected = draw(logits, temperatures, uniforms), draw_plain(logits, temperatures, uniforms)
    # A uniform number within rounding error of a boundary may fall on either side.
    assert (drawn != expected).sum() <= 2


def test_native_sampler_is_batch_invariant(draw: NativeSampler) -> None:
    torch.manual_seed(1)
    logits, temperatures = torch.randn(64, 5000), torch.rand(64) + 0.2
    uniforms = torch.rand(64, dtype=torch.float64)
    together = draw(logits, temperatures, uniforms)
    alone = [int(draw(logits[i : i + 1], temperatures[i : i + 1], uniforms[i : i + 1])) for i in range(64)]
    assert together.tolist() == alone


def test_native_sampler_handles_masked_and_nan_rows(draw: NativeSampler) -> None:
    never = float("-inf")
    logits = torch.full((5, 300), never)
    logits[0, 299] = -50.0
    logits[1, 3], logits[1, 4] = 0.0, float("nan")
    logits[3, 5] = float("inf")
    logits[4, :2] = torch.tensor([1.0, 1.0])
    high = torch.full((5,), 1 - 2**-53, dtype=torch.float64)
    assert draw(logits, torch.ones(5), high).tolist() == [299, -1, -1, -1, 1]
    assert draw(logits, torch.ones(5), torch.zeros(5, dtype=torch.float64)).tolist() == [299, -1, -1, -1, 0]


def test_native_sampler_accepts_strided_logits(draw: NativeSampler) -> None:
    logits = torch.randn(4, 400)
    logits[:, 300:] = 100.0  # padding that must not be drawn
    assert (draw(logits[:, :300], torch.ones(4), torch.full((4,), 0.99, dtype=torch.float64)) < 300).all()
