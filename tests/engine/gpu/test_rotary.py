from __future__ import annotations

import pytest
import torch

from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.gpu.kernels import reference, rotary
from tests.engine.gpu.kernel_inputs import BF16_TOLERANCE, FP32_TOLERANCE, nan_filled, random, relative_error


def tables(rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_tables({"rope_type": "default", "rope_theta": 1e6}, rotary_dim, 300, 300)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, FP32_TOLERANCE), (torch.bfloat16, BF16_TOLERANCE)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "rotary_dim", "normed"),
    [
        (4, 2, 128, 128, True),  # Qwen3
        (7, 1, 64, 64, False),  # Qwen2
        (3, 3, 96, 96, False),  # head size is no power of two
        (4, 1, 80, 32, True),  # partial rotary
        (2, 1, 256, 256, False),
        (4, 2, 64, 0, True),  # no rotary
    ],
)
def test_rotate_and_store_matches_reference(
    heads: int, kv_heads: int, size: int, rotary_dim: int, normed: bool, dtype: torch.dtype, limit: float
) -> None:
    tokens, block = 5, 16
    qkv = random(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    positions = torch.tensor([0, 1, 17, 250, 299], dtype=torch.int32)
    slots = torch.tensor([3, 16, 47, -1, 0])
    cos_sin = tables(rotary_dim) if rotary_dim else None
    norms = (random(size, seed=5), random(size, seed=6)) if normed else None
    keys, values = (nan_filled(4, kv_heads, block, size, dtype=dtype) for _ in range(2))
    expected, expected_keys, expected_values = qkv.clone(), keys.clone(), values.clone()
    reference.rotate_and_store(expected, positions, slots, cos_sin, norms, 1e-6, expected_keys, expected_values, heads)
    untouched = qkv[:, (heads + kv_heads) * size :].clone()
    rotary.rotate_and_store(qkv, positions, slots, cos_sin, norms, 1e-6, keys, values, heads)

    width = (heads + kv_heads) * size
    assert relative_error(qkv[:, :width], expected[:, :width]) < limit
    written = ~expected_keys.isnan()
    assert int(written.sum()) == 4 * kv_heads * size
    assert torch.equal(~keys.isnan(), written)
    assert torch.equal(~values.isnan(), written)
    assert relative_error(keys[written], expected_keys[written]) < limit
    assert torch.equal(values[written], expected_values[written])
    assert torch.equal(qkv[:, (heads + kv_heads) * size :], untouched)
