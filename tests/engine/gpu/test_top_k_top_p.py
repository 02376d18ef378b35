"""Filtered sampling on the device takes the tokens of the CPU sampler."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from syringa.engine.gpu import missing_triton
from syringa.engine.sampling import draw
from tests.engine.gpu.kernel_inputs import cpu_uniforms, random, sampling_keys

Sample = Callable[..., torch.Tensor]
FILTERS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (20, 1.0, 0.0),
    (20, 0.9, 0.0),
    (0, 0.8, 0.0),  # flat rows have more candidates than are gathered
    (0, 0.3, 0.0),
    (0, 1.0, 0.1),
    (50, 0.95, 0.05),
    (900, 0.99, 0.0),  # more than there are blocks
    (10**6, 0.5, 0.0),  # more than there are tokens
    (3, 1e-9, 0.0),
    (0, 1.0, 1.0),
]


@pytest.mark.parametrize(("spread", "max_candidates"), [(0.5, 64), (6.0, 8192)], ids=["flat", "peaked"])
def test_filtered_sample_equals_cpu(
    sample: Sample, spread: float, max_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not missing_triton():  # with more candidates, the kernel searches the whole row
        monkeypatch.setattr("syringa.engine.gpu.kernels.sampling._MAX_CANDIDATES", max_candidates)
    rows, size = len(FILTERS), 3000
    logits = random(rows, size, seed=3) * spread
    temperatures = torch.linspace(0.5, 1.5, rows)
    keys = sampling_keys(rows)
    top_k, top_p, min_p = (torch.tensor(column, dtype=torch.float64) for column in zip(*FILTERS, strict=True))
    expected = draw.draw_filtered(logits, temperatures, cpu_uniforms(keys), top_k, top_p, min_p)
    tokens = sample(logits, temperatures, *keys, top_k.int(), top_p, min_p)
    assert tokens.tolist() == expected.tolist()


def test_top_k_keeps_ties(sample: Sample) -> None:
    """Exactly the kept tokens are sampled; tokens that tie with the k-th one are kept."""
    rows = 12
    logits = torch.full((rows, 400), -5.0)
    logits[:, [10, 200, 390, 391]] = torch.tensor([3.0, 2.0, 1.0, 1.0])
    filters = torch.full((rows,), 3, dtype=torch.int32), torch.ones(rows, dtype=torch.float64), torch.zeros(rows)
    tokens = sample(logits, torch.full((rows,), 50.0), *sampling_keys(rows), *filters)
    assert set(tokens.tolist()) == {10, 200, 390, 391}


def test_top_k_with_fewer_unmasked_tokens(sample: Sample) -> None:
    logits = torch.full((4, 2000), float("-inf"))
    logits[:, [5, 1500, 1999]] = torch.tensor([0.0, 0.5, 1.0])
    filters = torch.full((4,), 8, dtype=torch.int32), torch.full((4,), 0.99, dtype=torch.float64), torch.zeros(4)
    tokens = sample(logits, torch.ones(4), *sampling_keys(4), *filters)
    expected = draw.draw_filtered(
        logits, torch.ones(4), cpu_uniforms(sampling_keys(4)), filters[0].double(), filters[1], filters[2].double()
    )
    assert tokens.tolist() == expected.tolist()
    assert len(set(tokens.tolist())) > 1
