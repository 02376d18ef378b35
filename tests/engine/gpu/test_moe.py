from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.kernels import moe, reference
from tests.engine.gpu.kernel_inputs import FP32_TOLERANCE, random, relative_error

SMALL = moe.MoeConfig(16, 16, 32, 4, 1)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "block"), [(1, 8, 2, 16), (5, 7, 3, 16), (150, 12, 4, 32)])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("max_chunk", [16, 4096])
def test_route_sorts_pairs_by_expert(
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    experts: int,
    top_k: int,
    block: int,
    normalize: bool,
    max_chunk: int,
) -> None:
    monkeypatch.setattr(moe, "MAX_CHUNK", max_chunk)
    logits = random(tokens, experts)
    routing = moe.route(logits, top_k, normalize=normalize, block=block)
    weights, ids = reference.route(logits, top_k, normalize=normalize)
    assert relative_error(routing.weights, weights) < FP32_TOLERANCE
    pairs = routing.pairs.view(-1, block)
    seen: list[int] = []
    for expert, row in zip(routing.experts.tolist(), pairs.tolist(), strict=True):
        if expert < 0:
            continue  # an unused block: its pairs are never read
        used = [pair for pair in row if pair >= 0]
        assert used
        assert row[: len(used)] == used  # padding is at the end of a block
        assert {int(ids.flatten()[pair]) for pair in used} <= {expert}
        seen += used
    assert sorted(seen) == list(range(tokens * top_k))
    used_experts = [expert for expert in routing.experts.tolist() if expert >= 0]
    assert used_experts == sorted(used_experts)


def test_route_breaks_ties_by_the_lower_expert() -> None:
    routing = moe.route(torch.zeros(3, 8), 2, normalize=True, block=16)
    assert routing.experts.tolist()[:2] == [0, 1]
    assert torch.equal(routing.weights, torch.full((3, 2), 0.5))


@pytest.mark.parametrize("tokens", [1, 3, 70])
@pytest.mark.parametrize("residual", [True, False])
def test_moe_mlp_matches_the_reference(tokens: int, residual: bool) -> None:
    hidden, intermediate, experts, top_k = 48, 40, 6, 2
    x, logits = random(tokens, hidden), random(tokens, experts, seed=1)
    gate_up, down = random(experts, 2 * intermediate, hidden, seed=2), random(experts, hidden, intermediate, seed=3)
    added = random(tokens, hidden, seed=4) if residual else None
    expected = reference.moe_mlp(x.double(), logits, gate_up.double(), down.double(), top_k)
    if added is not None:
        expected = expected + added
    found = moe.moe_mlp(x, logits, gate_up, down, top_k, residual=added, configs=(SMALL, SMALL))
    assert relative_error(found, expected) < FP32_TOLERANCE


def test_moe_mlp_does_not_depend_on_the_rows_beside() -> None:
    hidden, intermediate, experts, top_k = 32, 32, 5, 2
    x, logits = random(40, hidden), random(40, experts, seed=1)
    gate_up, down = random(experts, 2 * intermediate, hidden, seed=2), random(experts, hidden, intermediate, seed=3)
    together = moe.moe_mlp(x, logits, gate_up, down, top_k, configs=(SMALL, SMALL))
    for row in (0, 17, 39):
        alone = moe.moe_mlp(x[row : row + 1], logits[row : row + 1], gate_up, down, top_k, configs=(SMALL, SMALL))
        assert torch.equal(alone[0], together[row])
