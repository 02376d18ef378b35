"""The draws are the CPU sampler's: the same noise to the bit, and the same token for the same logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from syringa.engine.gpu import missing_triton
from syringa.engine.gpu.kernels import reference
from syringa.engine.sampling import draw
from tests.engine.gpu.paged import random

Sample = Callable[..., torch.Tensor]
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 12345, 987654321987654321]
CHOICES = [0, 1, 2, 3, 0, 127, 5]
POSITIONS = [0, 1, 2, 3, 1000000, 5, 131071]


@pytest.fixture(params=["reference", "kernel"])
def sample(request: pytest.FixtureRequest) -> Sample:
    if request.param == "reference":
        return reference.sample
    if reason := missing_triton():
        pytest.skip(reason)
    from syringa.engine.gpu.kernels import sampling

    return sampling.sample


def noise(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    index = torch.arange(rows)
    return index * 7919 - 50, (index % 3).int(), (index * 5).int()


def cpu_uniforms(keys: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.from_numpy(draw.uniforms(*(part.tolist() for part in keys)))


def test_the_noise_of_the_reference_is_the_cpus() -> None:
    ours = reference.uniforms(torch.tensor(SEEDS), torch.tensor(CHOICES), torch.tensor(POSITIONS))
    assert torch.equal(ours, torch.from_numpy(draw.uniforms(SEEDS, CHOICES, POSITIONS)))


def test_the_noise_of_the_kernel_is_the_cpus(sample: Sample) -> None:
    """Over logits that are all equal, the token is the number's leading digits: 2^-14 of a difference shows."""
    size = 1 << 14
    expected = draw.uniforms(SEEDS, CHOICES, POSITIONS)
    tokens = sample(
        torch.zeros(7, size), torch.ones(7), torch.tensor(SEEDS), torch.tensor(CHOICES), torch.tensor(POSITIONS)
    )
    assert tokens.tolist() == [int(u * size) for u in expected]


@pytest.mark.parametrize("size", [100, 128, 5000])
def test_plain_draws_are_the_cpus(sample: Sample, size: int) -> None:
    rows = 12
    logits = random(rows, size) * 3
    logits[:, ::7] = float("-inf")
    temperatures = torch.linspace(0.3, 2, rows)
    keys = noise(rows)
    expected = draw.draw_plain(logits, temperatures, cpu_uniforms(keys))
    assert sample(logits, temperatures, *keys).tolist() == expected.tolist()


def test_greedy_rows_take_the_first_of_the_best(sample: Sample) -> None:
    logits = random(3, 700)
    logits[0, [50, 300, 650]] = 9.0
    logits[1, 699] = 9.0
    logits[2] = -3.0
    tokens = sample(logits, torch.zeros(3), *noise(3))
    assert tokens.tolist() == [50, 699, 0] == draw.draw_greedy(logits).tolist()


def test_a_row_with_nothing_to_draw_from_gets_no_token(sample: Sample) -> None:
    logits = random(8, 300)
    logits[1] = float("-inf")
    logits[2, 77] = float("nan")
    logits[3, 299] = float("inf")
    logits[5] = float("-inf")
    logits[6, 0] = float("nan")
    temperatures = torch.tensor([1.0, 1, 1, 1, 0, 0, 0, 1])
    tokens = sample(logits, temperatures, *noise(8)).tolist()
    assert [t == draw.NO_TOKEN for t in tokens] == [False, True, True, True, False, True, True, False]


RULES = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (20, 1.0, 0.0),
    (20, 0.9, 0.0),
    (0, 0.8, 0.0),  # mostly beyond what is copied together, for flat rows
    (0, 0.3, 0.0),
    (0, 1.0, 0.1),
    (50, 0.95, 0.05),
    (900, 0.99, 0.0),  # more than there are blocks
    (10**6, 0.5, 0.0),  # more than there are tokens
    (3, 1e-9, 0.0),
    (0, 1.0, 1.0),
]


@pytest.mark.parametrize(("spread", "few"), [(0.5, 64), (6.0, 8192)], ids=["flat", "peaked"])
def test_filtered_draws_are_the_cpus(sample: Sample, spread: float, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not missing_triton():  # candidates that are too many to be copied together are found in the whole row
        monkeypatch.setattr("syringa.engine.gpu.kernels.sampling._FEW", few)
    rows, size = len(RULES), 3000
    logits = random(rows, size, seed=3) * spread
    temperatures = torch.linspace(0.5, 1.5, rows)
    keys = noise(rows)
    top_k, top_p, min_p = (torch.tensor(column, dtype=torch.float64) for column in zip(*RULES, strict=True))
    expected = draw.draw_filtered(logits, temperatures, cpu_uniforms(keys), top_k, top_p, min_p)
    tokens = sample(logits, temperatures, *keys, top_k.int(), top_p, min_p)
    assert tokens.tolist() == expected.tolist()


def test_what_a_filter_lets_through(sample: Sample) -> None:
    """Every token of the filtered set is drawn, and no other: equals of the last one belong to it."""
    rows = 12
    logits = torch.full((rows, 400), -5.0)
    logits[:, [10, 200, 390, 391]] = torch.tensor([3.0, 2.0, 1.0, 1.0])
    rules = torch.full((rows,), 3, dtype=torch.int32), torch.ones(rows, dtype=torch.float64), torch.zeros(rows)
    tokens = sample(logits, torch.full((rows,), 50.0), *noise(rows), *rules)
    assert set(tokens.tolist()) == {10, 200, 390, 391}


def test_masks_that_leave_fewer_than_k(sample: Sample) -> None:
    logits = torch.full((4, 2000), float("-inf"))
    logits[:, [5, 1500, 1999]] = torch.tensor([0.0, 0.5, 1.0])
    rules = torch.full((4,), 8, dtype=torch.int32), torch.full((4,), 0.99, dtype=torch.float64), torch.zeros(4)
    tokens = sample(logits, torch.ones(4), *noise(4), *rules)
    expected = draw.draw_filtered(
        logits, torch.ones(4), cpu_uniforms(noise(4)), rules[0].double(), rules[1], rules[2].double()
    )
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) > 1
