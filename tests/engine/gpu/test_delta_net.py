"""The kernels of gated delta nets against `models.delta_rule`, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syringa.engine.gpu.delta_net_rows import DeltaNet, DeltaNetRows
from syringa.engine.gpu.kernels import delta_net as kernels
from syringa.engine.gpu.kernels import elementwise
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.gpu.state_rows import make_state_rows, plan_chunks
from syringa.engine.models.delta_rule import DeltaNetParameters
from syringa.engine.models.hybrid_config import DeltaNetShape
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.hybrid_models import FULL, LINEAR, LONG_PROMPTS, make_config, save_hybrid
from tests.engine.models.tiny_models import difference, reference, run

CPU = torch.device("cpu")
SHAPES = {
    "groups": DeltaNetShape(key_heads=2, value_heads=4, key_size=16, value_size=32, kernel=4),
    "odd": DeltaNetShape(key_heads=1, value_heads=1, key_size=20, value_size=24, kernel=3),
}


def make_net(shape: DeltaNetShape) -> DeltaNet:
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    rate = -torch.linspace(-4, 1.5, shape.value_heads).exp()
    norm = 1 + 0.1 * random(shape.value_size)
    return DeltaNet(
        DeltaNetParameters(random(shape.kernel, shape.channels), rate, random(shape.value_heads), norm), shape, 1e-6
    )


def make_states(shape: DeltaNetShape, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    conv = torch.randn(slots, shape.kernel - 1, shape.channels, generator=generator)
    return conv, torch.randn(slots, shape.value_heads, shape.key_size, shape.value_size, generator=generator)


def compare(shape: DeltaNetShape, rows: DeltaNetRows, count: int, dtype: torch.dtype = torch.float32) -> None:
    """Check the output and all states, also those that must not change."""
    net, projected = make_net(shape), torch.randn(count, shape.projected, generator=torch.Generator().manual_seed(3))
    projected = projected.to(dtype)
    expected_states, states, others = (make_states(shape, 8) for _ in range(3))
    expected = ReferenceOps().delta_net(projected, net, rows, *expected_states)
    got = TritonOps().delta_net(projected, net, rows, *states)
    for found, wanted in zip((got, *states), (expected, *expected_states), strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        else:  # the kernels round the convolved inputs
            assert float((found.float() - wanted.float()).norm() / wanted.float().norm()) < 0.01
    width = shape.channels + shape.value_width  # with b and a apart, in rows of another stride
    apart = TritonOps().delta_net(projected[:, :width].contiguous(), net, rows, *others, projected[:, width:].clone())
    for found, wanted in zip((apart, *others), (got, *states), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", SHAPES)
def test_decode_kernels_match_reference(name: str) -> None:
    lengths = torch.tensor([5, 0, 1, 300], dtype=torch.int32)  # the second row is padding, the third has no state
    states = make_state_rows([3, -1, 0, 7], [], [], [], CPU)
    compare(SHAPES[name], DeltaNetRows(states, lengths, None, None), 4)


@pytest.mark.parametrize("name", SHAPES)
def test_decode_kernels_match_reference_with_heads_in_several_programs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MANY_HEADS", 1)
    monkeypatch.setattr(kernels, "DECODE_BLOCK", 16)
    lengths = torch.tensor([5, 0, 1], dtype=torch.int32)
    compare(SHAPES[name], DeltaNetRows(make_state_rows([3, -1, 0], [], [], [], CPU), lengths, None, None), 3)


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_kernels_match_reference_for_short_chunks(name: str) -> None:
    first, counts = [0, 60, 0], [5, 10, 2]
    states = make_state_rows([2, 5, 1], first, counts, [(0, 0), (4, 3), (0, 0)], CPU)
    starts = torch.tensor([0, 5, 15, 17], dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int32)
    compare(SHAPES[name], DeltaNetRows(states, none, starts, torch.tensor(first, dtype=torch.int32)), 17)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_prefill_kernels_match_reference_with_decode_rows_and_snapshots(name: str) -> None:
    """Chunks that begin inside another step's chunk, shorter than the convolution, and of several multiples."""
    first, counts = [0, 100, 30, 0], [70, 30, 34, 2]
    # After 64 rows, never, after the last row, never.
    states = make_state_rows([2, 5, 0, 1, 6], first, counts, [(64, 3), (0, 0), (34, 4), (0, 0)], CPU)
    starts = torch.tensor([0, 70, 100, 134, 136], dtype=torch.int32)
    rows = DeltaNetRows(states, torch.tensor([9], dtype=torch.int32), starts, torch.tensor(first, dtype=torch.int32))
    compare(SHAPES[name], rows, 137)


def test_kernels_match_reference_in_bf16() -> None:
    states = make_state_rows([2, 1], [54], [12], [(10, 5)], CPU)
    starts, first = (torch.tensor(each, dtype=torch.int32) for each in ([0, 12], [54]))
    rows = DeltaNetRows(states, torch.tensor([4], dtype=torch.int32), starts, first)
    compare(SHAPES["odd"], rows, 13, torch.bfloat16)


def test_chunks_start_at_multiples_of_positions() -> None:
    plan = plan_chunks([0, 70, 100, 101], [0, 100, 63])
    assert plan.chunk_starts.tolist() == [0, 2, 4, 5]  # positions 0 and 64; 100 and 128; 63
    assert plan.chunk_sequences.tolist() == [0, 0, 1, 1, 2]
    assert plan.row_sequences.tolist() == [0] * 70 + [1] * 30 + [2]


def test_sigmoid_mul_multiplies_strided_gates_in_place() -> None:
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    x, gates = rows[:, :20].clone(), rows[:, 30:]
    expected = x * gates.sigmoid()
    assert elementwise.sigmoid_mul(x, gates) is x
    torch.testing.assert_close(x, expected)


def test_add_weighted_matches_reference() -> None:
    out, y, x, weight = torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(6)).unbind()
    expected = ReferenceOps().add_weighted(out.clone(), y, x, weight[:1])
    torch.testing.assert_close(elementwise.add_weighted(out, y, x, weight[:1]), expected)


@pytest.mark.slow
def test_gpu_hybrid_on_kernels_matches_transformers(tmp_path: Path) -> None:
    """A step of prompts, then one that continues one of them beside a token of the other."""
    config = make_config("qwen3_next", num_hidden_layers=2, layer_types=[LINEAR, FULL], mlp_only_layers=[])
    hf_model = save_hybrid(tmp_path, config)
    loaded = load_tiny_gpu_model(tmp_path, ops=TritonOps())
    prompts = [LONG_PROMPTS[-1][:9], LONG_PROMPTS[0][:6]]
    for got, prompt in zip(run(loaded, prompts, chunk=5), prompts, strict=True):
        assert difference(got, reference(hf_model, prompt)) < 2e-3
