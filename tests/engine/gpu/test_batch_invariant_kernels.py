"""Batch-invariant kernels against their references.

Equality of bits is checked on a GPU (`python -m bench.gpu_batch_invariant`), since the interpreter sums with NumPy.
"""

from __future__ import annotations

from typing import Any

import pytest

from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.kernels.batch_invariant_attention import batch_invariant_decode_attention
from syringa.engine.gpu.kernels.batch_invariant_matmul import (
    DESCRIBED_CONFIGS,
    TILED_CONFIGS,
    TiledMatmulConfig,
    batch_invariant_matmul,
    choose_config,
)
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig
from syringa.engine.gpu.ops.linear import SKINNY_ROWS
from tests.engine.gpu.kernel_inputs import (
    ATTENTION_SHAPES,
    FP32_TOLERANCE,
    PagedCache,
    nan_filled,
    random,
    relative_error,
)

TILES = [
    SkinnyConfig(16, 64, 1, 1),
    TiledMatmulConfig(32, 16, 32, 1, 1, group=2),
    TiledMatmulConfig(16, 64, 16, 1, 1),
    TiledMatmulConfig(32, 16, 32, 1, 1, group=2, resident=1),  # from here on with descriptors
    TiledMatmulConfig(16, 64, 16, 1, 1, resident=2),
    TiledMatmulConfig(16, 256, 16, 1, 1, resident=1),  # stored in halves
]


@pytest.mark.parametrize("config", [None, *TILES], ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 40, 96), (17, 130, 52), (64, 33, 32), (70, 100, 68), (80, 300, 32)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_matmul_matches_reference(
    config: SkinnyConfig | TiledMatmulConfig | None, rows: int, outputs: int, inputs: int, bias: bool
) -> None:
    if isinstance(config, SkinnyConfig) and rows > SKINNY_ROWS:
        pytest.skip("more rows than the kernel supports")
    if isinstance(config, TiledMatmulConfig) and config.resident and rows < config.rows:
        pytest.skip("fewer rows than a tile has")
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    offset = random(outputs, seed=2) if bias else None
    out = batch_invariant_matmul(x, weight, offset, out=nan_filled(rows, outputs), config=config)
    assert relative_error(out, reference.linear(x, weight, offset)) < FP32_TOLERANCE


def test_matmul_accepts_strided_rows() -> None:
    x, weight = random(70, 3 * 40)[:, 40:80], random(24, 40, seed=1)
    for rows, config in ((x[:3], None), (x, None), (x, TILES[-1])):
        out = batch_invariant_matmul(rows, weight, config=config)
        assert relative_error(out, reference.linear(rows, weight)) < FP32_TOLERANCE
    assert batch_invariant_matmul(x[:0], weight).shape == (0, 24)


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("outputs", [64, 1024, 4096, 24576, 151936])
def test_matmul_never_splits_inputs(outputs: int, described: bool) -> None:
    """Split inputs would be summed in another order."""
    for rows in (1, 2, 16, 17, 64, 65, 127, 128, 256, 8192):
        config = choose_config(rows, outputs, described=described)
        assert isinstance(config, SkinnyConfig) == (rows <= SKINNY_ROWS)
        if isinstance(config, SkinnyConfig):
            assert config.splits == 1
        else:
            assert config in (DESCRIBED_CONFIGS if described else TILED_CONFIGS)
            assert config.rows <= rows or not described


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "window"), ATTENTION_SHAPES)
def test_decode_attention_matches_reference(heads: int, kv_heads: int, size: int, block: int, window: int) -> None:
    cache = PagedCache([1, 16, 0, 33, 70], kv_heads, size, block)
    q = random(5, heads * size)
    tensors = cache.keys, cache.values, cache.tables, cache.lengths
    expected = reference.decode_attention(q.view(5, heads, size), *tensors, window=window)
    out = batch_invariant_decode_attention(q, *tensors, heads, window=window, out=nan_filled(5, heads * size))
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE
    assert not out[2].any(), "padding rows are zero"


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (20, 2.0)])
def test_decode_attention_adds_sinks_and_caps_scores(window: int, softcap: float) -> None:
    cache = PagedCache([1, 16, 0, 33], 2, 64)
    q, sinks = random(4, 6 * 64), 3 * random(6, seed=4)
    tensors = cache.keys, cache.values, cache.tables, cache.lengths
    options: dict[str, Any] = {"window": window, "sinks": sinks, "softcap": softcap}
    expected = reference.decode_attention(q.view(4, 6, 64), *tensors, **options)
    out = batch_invariant_decode_attention(q, *tensors, 6, **options, out=nan_filled(4, 6 * 64))
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE
    assert not out[2].any(), "padding rows are zero"


def test_decode_attention_with_more_query_heads_than_tile_rows() -> None:
    cache = PagedCache([33, 5], 1, 32)
    q = random(2, 80 * 32)
    tensors = cache.keys, cache.values, cache.tables, cache.lengths
    expected = reference.decode_attention(q.view(2, 80, 32), *tensors)
    out = batch_invariant_decode_attention(q, *tensors, 80, out=nan_filled(2, 80 * 32))
    assert relative_error(out, expected.flatten(1)) < FP32_TOLERANCE
