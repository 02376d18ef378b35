from __future__ import annotations

import pytest
import torch

from syringa.engine.gpu.kernels import launch, reference
from syringa.engine.gpu.kernels.gemv import GemvConfig
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig
from syringa.engine.gpu.ops.linear import Config, choose, linear
from tests.engine.gpu.paged import CUT, EXACT, distance, poisoned, random

ONE_ROUND = GemvConfig(outputs=4, inputs=128, warps=1)
ROUNDS = GemvConfig(outputs=4, inputs=32, warps=1)
STAGED = GemvConfig(outputs=4, inputs=32, warps=1, stages=2)
DOT = SkinnyConfig(outputs=16, inputs=32, warps=1, stages=2)
SPLIT = SkinnyConfig(outputs=16, inputs=32, warps=1, stages=2, splits=3)


@pytest.mark.parametrize("extras", ["plain", "bias", "residual", "gated", "all"])
@pytest.mark.parametrize(
    ("rows", "config"), [(1, ONE_ROUND), (1, ROUNDS), (2, STAGED), (2, ROUNDS), (5, DOT), (1, SPLIT), (17, SPLIT)]
)
def test_linear(rows: int, config: Config, extras: str) -> None:
    inputs, outputs = 128, 30  # outputs do not fill the last tile
    gated = extras in ("gated", "all")
    x, weight = random(rows, inputs), random(outputs * (2 if gated else 1), inputs, seed=1) / 8
    bias = random(len(weight), seed=2) if extras in ("bias", "all") else None
    residual = random(rows, outputs, seed=3) if extras in ("residual", "all") else None
    gain = random(inputs, seed=4) if extras == "all" and isinstance(config, GemvConfig) else None
    options = {"gain": gain, "eps": 1e-6, "gated": gated, "residual": residual}
    expected = reference.linear(x.double(), weight, bias, dtype=torch.float64, **options)  # type: ignore[arg-type]
    out = linear(x, weight, bias, out=poisoned(rows, outputs), config=config, **options)  # type: ignore[arg-type]
    assert distance(out, expected) < EXACT
    assert not launch.scratch(x.device, 0, 0)[1].any(), "a counter was left behind"


@pytest.mark.parametrize("config", [ROUNDS, STAGED, DOT, SPLIT])
def test_inputs_that_fill_no_round(config: Config) -> None:
    x, weight = random(2, 100), random(8, 100, seed=1)
    out = linear(x, weight, out=poisoned(2, 8), config=config)
    assert distance(out, reference.linear(x.double(), weight, dtype=torch.float64)) < EXACT


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
def test_bf16(out: torch.dtype) -> None:
    x, weight = random(2, 128, dtype=torch.bfloat16), random(24, 128, seed=1, dtype=torch.bfloat16) / 8
    result = linear(x, weight, gain=weight[0], eps=1e-6, config=ROUNDS, out_dtype=out)
    expected = reference.linear(x, weight, gain=weight[0], eps=1e-6, out_dtype=out)
    assert result.dtype == out
    assert distance(result, expected) < (CUT if out == torch.bfloat16 else EXACT)


def test_the_residual_may_be_written_in_place() -> None:
    x, weight, residual = random(1, 64), random(8, 64, seed=1), random(1, 8, seed=2)
    expected = reference.linear(x, weight, residual=residual)
    assert linear(x, weight, residual=residual, out=residual, config=ROUNDS) is residual
    assert distance(residual, expected) < EXACT


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_the_choice_by_shape_gives_the_same(rows: int) -> None:
    x, weight = random(rows, 64), random(48, 64, seed=1) / 8
    gain, residual = random(64, seed=2), random(rows, 24, seed=3)
    expected = reference.linear(x, weight, gain=gain, eps=1e-6, gated=True, residual=residual)
    assert distance(linear(x, weight, gain=gain, eps=1e-6, gated=True, residual=residual), expected) < EXACT


def test_many_rows_go_to_the_library() -> None:
    assert isinstance(choose(1, 4096, 4096, False), GemvConfig)
    assert isinstance(choose(16, 4096, 4096, False), SkinnyConfig)
    assert choose(65, 4096, 4096, False) is None


def test_no_rows_are_no_work() -> None:
    """A step in the middle of a prompt may want nobody's logits."""
    weight = random(8, 16)
    out = linear(weight.new_empty(0, 16), weight)
    assert out.shape == (0, 8)
