"""Stored tensors as fp32 and int8 in every built variant of the kernels, compared bit by bit with the gguf package."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from syringa.engine.cpu.layers.linear import BlockTensor, Gate, Int8Linear
from syringa.engine.cpu.native import BLOCK_TYPES, FLOAT_TYPES, Kernels
from syringa.errors import ModelError
from tests.engine.cpu.test_quantized_linear import VARIANTS, variant
from tests.engine.gguf_blocks import HALVES, block_size, dequantize, random_blocks

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels were built: there was no compiler")
TYPES = [*BLOCK_TYPES, *FLOAT_TYPES]


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return variant(request.param)


def stored(type_name: str, rows: int, inputs: int, seed: int = 0, scale: float = 0.01) -> BlockTensor:
    if type_name in FLOAT_TYPES:
        values = np.random.default_rng(seed).normal(0, scale, (rows, inputs)).astype(np.float32)
        data = quants.quantize(values, GGMLQuantizationType[type_name]).view(np.uint8)
    else:
        data = random_blocks(type_name, rows, inputs, seed, scale)
    return BlockTensor("w", type_name, rows, inputs, data)


def expected(tensor: BlockTensor) -> torch.Tensor:
    weights = torch.from_numpy(np.array(dequantize(tensor.data, tensor.type)))
    return weights if tensor.order is None else weights[torch.from_numpy(tensor.order).long()]


@pytest.mark.parametrize("type_name", TYPES)
def test_dequantize_matches_gguf_exactly(kernels: Kernels, type_name: str) -> None:
    order = np.random.default_rng(3).permutation(19).astype(np.int32)
    for scale in (0.01, 3e-6, 1e4):  # usual, subnormal and large halves
        tensor = stored(type_name, 19, 512, scale=scale)
        for each in (tensor, tensor._replace(order=order)):
            assert torch.equal(each.dequantize(kernels), expected(each))
            assert torch.equal(each.dequantize(kernels, torch.bfloat16), expected(each).bfloat16())


@pytest.mark.parametrize("type_name", list(FLOAT_TYPES))
def test_dequantize_reads_rows_of_any_length(kernels: Kernels, type_name: str) -> None:
    tensor = stored(type_name, 5, 67)
    assert torch.equal(tensor.dequantize(kernels), expected(tensor))
    assert torch.equal(tensor.dequantize(kernels, torch.bfloat16), expected(tensor).bfloat16())


@pytest.mark.parametrize("type_name", TYPES)
def test_int8_linear_of_stored_tensor_matches_that_of_its_weights(kernels: Kernels, type_name: str) -> None:
    tensor = stored(type_name, 75, 512)
    x = torch.randn(3, 512, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Int8Linear(kernels, [tensor], None)(x), Int8Linear(kernels, expected(tensor), None)(x))


@pytest.mark.parametrize("gated", [False, True])
def test_int8_linear_joins_tensors_of_different_types(kernels: Kernels, gated: bool) -> None:
    order = np.random.default_rng(3).permutation(96).astype(np.int32)
    tensors = [stored("Q4_K", 96, 512)._replace(order=order), stored("Q5_0", 21, 512, 1), stored("BF16", 33, 512, 2)]
    weight, bias, x = torch.cat([expected(tensor) for tensor in tensors]), torch.randn(150), torch.randn(9, 512)
    layer = Int8Linear(kernels, tensors, bias, gate=Gate() if gated else None)
    assert layer.outputs == (75 if gated else 150)
    assert torch.equal(layer(x), Int8Linear(kernels, weight, bias, gate=Gate() if gated else None)(x))


def test_int8_linear_rounds_weights_to_nearest_even(kernels: Kernels) -> None:
    """Each weight alone, multiplied with 1."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(40, 64, generator=generator)
    weight[:, 0] = 127.0  # the scale is 1: halves are ties
    weight[:, 1:] = (weight[:, 1:] * 40).round().clamp(-126, 125) + 0.5
    numbers = Int8Linear(kernels, weight, None)(torch.eye(64)).T
    assert (numbers - weight.round()).abs().max() < 1e-4


@pytest.mark.parametrize("type_name", TYPES)
def test_number_that_is_not_finite_is_refused(kernels: Kernels, type_name: str) -> None:
    size = block_size(type_name)[1]
    bad = {"F32": b"\0\0\x80\x7f", "BF16": b"\x80\xff", "MXFP4": b"\xff"}.get(type_name, b"\x00\x7c")
    for offset in HALVES.get(type_name, (0,)) or (0,):
        tensor = stored(type_name, 70, 512)
        blocks = tensor.data.reshape(70, -1, size)
        blocks[69, -1, offset : offset + len(bad)] = np.frombuffer(bad, np.uint8)
        what = "scale" if type_name in BLOCK_TYPES else "weight"
        with pytest.raises(ModelError, match=rf"^w is corrupt: a {what} is not a finite number"):
            tensor.dequantize(kernels)
        with pytest.raises(ModelError, match=r"^w is corrupt"):
            Int8Linear(kernels, [stored(type_name, 5, 512)._replace(name="v"), tensor], None)
