"""Sampling on the device uses the random numbers of the CPU sampler, bit for bit, and takes the same tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from syringa.engine.gpu.kernels import reference
from syringa.engine.sampling import draw
from syringa.engine.sampling.sampler_input import NO_TOKEN
from tests.engine.gpu.kernel_inputs import cpu_uniforms, random, sampling_keys

Sample = Callable[..., torch.Tensor]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 12345, 987654321987654321]
CHOICES = [0, 1, 2, 3, 0, 127, 5]
POSITIONS = [0, 1, 2, 3, 1000000, 5, 131071]


def test_reference_uniforms_equal_cpu() -> None:
    uniforms = reference.uniforms(torch.tensor(SEEDS), torch.tensor(CHOICES), torch.tensor(POSITIONS))
    assert torch.equal(uniforms, torch.from_numpy(draw.uniforms(SEEDS, CHOICES, POSITIONS)))


def test_sample_uses_uniforms_of_cpu(sample: Sample) -> None:
    """With equal logits the token is the uniform number's leading bits, so a difference of 2^-14 is detected."""
    size = 1 << 14
    expected = draw.uniforms(SEEDS, CHOICES, POSITIONS)
    tokens = sample(
        torch.zeros(7, size), torch.ones(7), torch.tensor(SEEDS), torch.tensor(CHOICES), torch.tensor(POSITIONS)
    )
    assert tokens.tolist() == [int(u * size) for u in expected]


@pytest.mark.parametrize("size", [100, 128, 5000])
def test_unfiltered_sample_equals_cpu(sample: Sample, size: int) -> None:
    rows = 12
    logits = random(rows, size) * 3
    logits[:, ::7] = float("-inf")
    temperatures = torch.linspace(0.3, 2, rows)
    keys = sampling_keys(rows)
    expected = draw.draw_plain(logits, temperatures, cpu_uniforms(keys))
    assert sample(logits, temperatures, *keys).tolist() == expected.tolist()


def test_greedy_sample_takes_first_maximum(sample: Sample) -> None:
    logits = random(3, 700)
    logits[0, [50, 300, 650]] = 9.0
    logits[1, 699] = 9.0
    logits[2] = -3.0
    tokens = sample(logits, torch.zeros(3), *sampling_keys(3))
    assert tokens.tolist() == [50, 699, 0] == draw.draw_greedy(logits).tolist()


def test_sample_returns_no_token_for_invalid_rows(sample: Sample) -> None:
    logits = random(8, 300)
    logits[1] = float("-inf")
    logits[2, 77] = float("nan")
    logits[3, 299] = float("inf")
    logits[5] = float("-inf")
    logits[6, 0] = float("nan")
    temperatures = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 1])
    tokens = sample(logits, temperatures, *sampling_keys(8)).tolist()
    assert [t == NO_TOKEN for t in tokens] == [False, True, True, True, False, True, True, False]
