from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.gpu.kernels import moe, reference
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.models.config import ClampedSwiglu
from tests.engine.gpu.kernel_inputs import FP32_TOLERANCE, random, relative_error
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.native_models import GPT_OSS
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, run, save

SMALL = moe.MoeConfig(16, 16, 32, 4, 1)


@pytest.fixture(params=[True, False], ids=["descriptors", "pointers"])
def weights_loaded_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By descriptors as on GPUs from Hopper on, or by pointers as on others."""
    monkeypatch.setattr(moe, "loads_descriptors_ahead", lambda: request.param)


@pytest.mark.parametrize(("tokens", "experts", "top_k", "block"), [(1, 8, 2, 16), (5, 7, 3, 16), (70, 12, 4, 32)])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("max_chunk", [64, 4096])
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


@pytest.mark.parametrize("tokens", [1, 5, 70])
@pytest.mark.parametrize("normalize", [True, False])
def test_route_with_sigmoid_scores_adds_shared_experts(tokens: int, normalize: bool) -> None:
    sigmoid = reference.SigmoidScores(random(7, seed=5), 2.5)
    logits = random(tokens, 7)
    routing = moe.route(logits, 3, normalize=normalize, sigmoid=sigmoid, shared=2, block=16)
    weights, ids = reference.route(logits, 3, normalize=normalize, sigmoid=sigmoid, shared=2)
    assert relative_error(routing.weights, weights) < FP32_TOLERANCE
    assert ids[:, 3:].tolist() == [[7, 8]] * tokens
    assert weights[:, 3:].tolist() == [[1.0, 1.0]] * tokens
    assert not torch.equal(ids, reference.route(logits, 3, normalize=normalize, shared=2)[1])  # the correction counts
    found = {
        pair: expert
        for expert, row in zip(routing.experts.tolist(), routing.pairs.view(-1, 16).tolist(), strict=True)
        for pair in row
        if expert >= 0 and pair >= 0
    }
    assert [found[pair] for pair in range(5 * tokens)] == ids.flatten().tolist()


def test_route_breaks_ties_by_the_lower_expert() -> None:
    routing = moe.route(torch.zeros(3, 8), 2, normalize=True, block=16)
    assert routing.experts.tolist()[:2] == [0, 1]
    assert torch.equal(routing.weights, torch.full((3, 2), 0.5))


@pytest.mark.usefixtures("weights_loaded_by")
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


@pytest.mark.usefixtures("weights_loaded_by")
@pytest.mark.parametrize("swiglu", [None, ClampedSwiglu(1.702, 2.0)])
@pytest.mark.parametrize(("tokens", "tile"), [(1, SMALL), (9, SMALL), (9, moe.MoeConfig(16, 32, 64, 4, 1))])
def test_moe_mlp_with_biases_and_clamped_gate_matches_the_reference(
    tokens: int, tile: moe.MoeConfig, swiglu: ClampedSwiglu | None
) -> None:
    """The sizes are multiples of neither tile, as gpt-oss's 2880 is of 128 and 256."""
    hidden, intermediate, experts, top_k = 56, 40, 5, 3
    x, logits = random(tokens, hidden), random(tokens, experts, seed=1)
    gate_up, down = random(experts, 2 * intermediate, hidden, seed=2), random(experts, hidden, intermediate, seed=3)
    biases = 3 * random(experts, 2 * intermediate, seed=5), 3 * random(experts, hidden, seed=6)
    expected = reference.moe_mlp(
        x.double(),
        logits,
        gate_up.double(),
        down.double(),
        top_k,
        biases=(biases[0].double(), biases[1].double()),
        swiglu=swiglu,
    )
    found = moe.moe_mlp(x, logits, gate_up, down, top_k, biases=biases, swiglu=swiglu, configs=(tile, tile))
    assert relative_error(found, expected) < FP32_TOLERANCE


def test_moe_mlp_does_not_depend_on_the_rows_beside() -> None:
    hidden, intermediate, experts, top_k = 32, 32, 5, 2
    x, logits = random(40, hidden), random(40, experts, seed=1)
    gate_up, down = random(experts, 2 * intermediate, hidden, seed=2), random(experts, hidden, intermediate, seed=3)
    together = moe.moe_mlp(x, logits, gate_up, down, top_k, configs=(SMALL, SMALL))
    for row in (0, 17, 39):
        alone = moe.moe_mlp(x[row : row + 1], logits[row : row + 1], gate_up, down, top_k, configs=(SMALL, SMALL))
        # Not bit-equal everywhere: the interpreter multiplies with NumPy, where a row's place in a tile may matter.
        torch.testing.assert_close(alone[0], together[row], rtol=1e-5, atol=1e-5)


def test_gpt_oss_on_kernels_matches_reference_ops(tmp_path: Path) -> None:
    """Prefill, a step with decode and prefill rows, and decode steps on the fused path; sinks, windows and experts."""
    sizes = SIZES | GPT_OSS | {"num_hidden_layers": 1, "sliding_window": 3}
    save(tmp_path, AutoConfig.for_model("gpt_oss", **sizes))
    prompts = [PROMPTS[0][:5], PROMPTS[2][:8]]  # short: a step takes a second in the interpreter
    expected = run(load_tiny_gpu_model(tmp_path), prompts)
    on_kernels = load_tiny_gpu_model(tmp_path, ops=TritonOps())
    found = [*run(on_kernels, prompts, chunk=4), *run(on_kernels, [prompts[0][:2]], chunk=1)]
    for logits, wanted in zip(found, [*expected, expected[0][:2]], strict=True):
        assert difference(logits, wanted) < 1e-5
