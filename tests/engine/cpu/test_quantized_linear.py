"""GGUF's quantized blocks in every built variant of the kernels: compared with the gguf package's dequantization in
exact arithmetic, and each row with itself in other batches."""

from __future__ import annotations

import ctypes
import functools
import math
from ctypes import byref

import numpy as np
import pytest
import torch

from syringa.engine.cpu.features import cpu_flags
from syringa.engine.cpu.layers.linear import BlockEmbedding, BlockLinear, BlockTensor, Gate
from syringa.engine.cpu.native import BLOCK_TYPES, FOLDER, REQUIRED_FLAGS, Kernels
from syringa.errors import ModelError
from tests.engine.gguf_blocks import HALVES, block_size, dequantize, random_blocks

VARIANTS = [
    name for name, flags in REQUIRED_FLAGS.items() if flags <= cpu_flags() and (FOLDER / f"kernels_{name}.so").exists()
]
if "avx512bf16" in VARIANTS:
    VARIANTS.remove("avx512")  # the same code for these products
pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels were built: there was no compiler")

TYPES = list(BLOCK_TYPES)


@functools.cache
def variant(name: str) -> Kernels:
    return Kernels(name, ctypes.CDLL(str(FOLDER / f"kernels_{name}.so")), 2)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return variant(request.param)


def random_tensor(type_name: str, rows: int, inputs: int, seed: int = 0) -> BlockTensor:
    """Return a tensor of random blocks: every bit is random, apart from the scales, which are of a usual size."""
    return BlockTensor("w", type_name, rows, inputs, random_blocks(type_name, rows, inputs, seed))


def dequantized(tensor: BlockTensor) -> torch.Tensor:
    weights = dequantize(tensor.data, tensor.type)
    order = tensor.order if tensor.order is not None else np.arange(tensor.rows)
    return torch.from_numpy(weights[order]).double()


def quantized_rows(x: torch.Tensor, type_name: str) -> torch.Tensor:
    """Return the activations as the kernels round them: to 127 steps of the peak of a group of 64 or 128 inputs."""
    rows, inputs = x.shape
    group = min(128, max(64, block_size(type_name)[0]))
    groups = torch.nn.functional.pad(x, (0, -inputs % group)).view(rows, -1, group)
    peak = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(peak > 0, 127 / peak, 0)
    return ((groups.double() * inverse.double()).round() * (peak / 127).double()).view(rows, -1)[:, :inputs]


def assert_close(y: torch.Tensor, x: torch.Tensor, tensor: BlockTensor) -> None:
    """Allow for the rounding of fp32 sums, by the size of what is added up."""
    exact, w = quantized_rows(x, tensor.type), dequantized(tensor)
    size = exact.abs() @ w.abs().T
    assert ((y - exact @ w.T).abs() <= 4e-7 * size + 1e-9).all()


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("blocks", [1, 3])
def test_block_embedding_matches_gguf(kernels: Kernels, type_name: str, blocks: int) -> None:
    tensor = random_tensor(type_name, 75, blocks * block_size(type_name)[0])
    embedding = BlockEmbedding(BlockLinear(kernels, [tensor], None))
    tokens = torch.tensor([3, 74, 0, 3, 17, *range(40)])
    assert torch.equal(embedding[tokens].double(), dequantized(tensor)[tokens])
    assert torch.equal(embedding[tokens[1:2].int()], embedding[tokens][1:2])


@pytest.mark.parametrize("token", [-1, 75, 2**32])
def test_block_embedding_refuses_tokens_that_it_does_not_have(kernels: Kernels, token: int) -> None:
    embedding = BlockEmbedding(BlockLinear(kernels, [random_tensor("Q4_K", 75, 256)], None))
    for count in (1, 9):
        with pytest.raises(IndexError, match="the embedding has 75 rows"):
            embedding[torch.tensor([74] * (count - 1) + [token])]
    assert embedding[torch.empty(0, dtype=torch.int64)].shape == (0, 256)


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (33, 3), (75, 7)])
def test_block_linear_matches_dequantized_product(kernels: Kernels, type_name: str, outputs: int, blocks: int) -> None:
    inputs = blocks * block_size(type_name)[0]
    tensor = random_tensor(type_name, outputs, inputs)
    layer = BlockLinear(kernels, [tensor], None)
    generator = torch.Generator().manual_seed(1)
    for rows in (1, 3, 9):
        x = torch.randn(rows, inputs, generator=generator)
        assert_close(layer(x), x, tensor)


@pytest.mark.parametrize("type_name", TYPES)
def test_block_linear_of_extreme_numbers_does_not_saturate(kernels: Kernels, type_name: str) -> None:
    """All numbers of a block at their largest or smallest, times activations at their peak."""
    inputs = 512
    tensors = [random_tensor(type_name, 4, inputs, seed) for seed in range(2)]
    size = block_size(type_name)[1]
    scales = {offset + i for offset in HALVES.get(type_name, (0,)) for i in (0, 1)} | {
        0,
        1,
    }
    rest = [i for i in range(size) if i not in scales]
    for tensor, byte in zip(tensors, (0xFF, 0x00), strict=True):
        tensor.data.reshape(4, -1, size)[:, :, rest] = byte
    tensor = random_tensor(type_name, 8, inputs)._replace(data=np.concatenate([t.data for t in tensors]))
    x = torch.stack(
        [
            torch.ones(inputs),
            -torch.ones(inputs),
            torch.tensor([1.0, -1.0]).repeat(inputs // 2),
        ]
    )
    layer = BlockLinear(kernels, [tensor], None)
    assert_close(layer(x), x, tensor)
    assert torch.equal(layer(x.repeat(7, 1))[-3:], layer(x))


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_block_linear_of_no_number_is_no_number(kernels: Kernels, type_name: str, number: float) -> None:
    layer = BlockLinear(kernels, [random_tensor(type_name, 40, 512)], None)
    for position in (0, 31, 100, 300, 511):
        x = torch.zeros(3, 512)
        x[1, position] = number
        assert (~layer(x).isfinite()).all(1).tolist() == [False, True, False]


@pytest.mark.parametrize("type_name", TYPES)
@pytest.mark.parametrize("add", [False, True])
def test_block_linear_is_batch_invariant(kernels: Kernels, type_name: str, add: bool) -> None:
    inputs = 3 * 256
    tensor = random_tensor(type_name, 75, inputs)
    bias, x, residual = torch.randn(75), torch.randn(70, inputs), torch.randn(70, 75)
    layer = BlockLinear(kernels, [tensor], bias)

    def rows(first: int, last: int) -> torch.Tensor:
        return layer(x[first:last].clone(), add_to=residual[first:last].clone() if add else None)

    whole = rows(0, 70)
    expected = quantized_rows(x, type_name) @ dequantized(tensor).T + bias + (residual if add else 0)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-4, atol=1e-4)
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 9, 31):
        for first in (0, 13, 70 - count):
            assert torch.equal(rows(first, first + count), whole[first : first + count]), (first, count)


def test_block_linear_large_batch_matches_single_rows(kernels: Kernels) -> None:
    """Rows are multiplied in blocks that fit in the cache."""
    for type_name, rows, inputs in (("Q4_K", 90, 8960), ("Q6_K", 200, 256)):
        layer = BlockLinear(kernels, [random_tensor(type_name, 40, inputs)], None)
        x = torch.randn(rows, inputs)
        whole = layer(x)
        for row in (0, 28, 29, 57, rows - 1):
            assert torch.equal(layer(x[row : row + 1].clone()), whole[row : row + 1])


@pytest.mark.skipif("avx2" not in VARIANTS or VARIANTS[0] == "avx2", reason="needs AVX2 and another variant")
@pytest.mark.parametrize("type_name", TYPES)
def test_block_linear_has_equal_bits_in_all_variants_from_avx2_on(type_name: str) -> None:
    tensor, x = random_tensor(type_name, 75, 768), torch.randn(11, 768)
    expected = BlockLinear(variant("avx2"), [tensor], None)(x)
    for name in VARIANTS[: VARIANTS.index("avx2")]:
        assert torch.equal(BlockLinear(variant(name), [tensor], None)(x), expected), name


def test_block_linear_of_no_rows_is_empty(kernels: Kernels) -> None:
    """A step that ends inside of a prompt needs no logits."""
    assert BlockLinear(kernels, [random_tensor("Q4_K", 40, 256)], None)(torch.empty(0, 256)).shape == (0, 40)


def test_block_linear_fuses_tensors_of_different_types(kernels: Kernels) -> None:
    tensors = [random_tensor(name, rows, 512, rows) for name, rows in (("Q4_K", 96), ("Q5_0", 20), ("Q6_K", 33))]
    bias, x = torch.randn(149), torch.randn(11, 512)
    layer = BlockLinear(kernels, tensors, bias)
    parts = [BlockLinear(kernels, [tensor], b)(x) for tensor, b in zip(tensors, bias.split([96, 20, 33]), strict=True)]
    assert layer.outputs == 149
    assert torch.equal(layer(x), torch.cat(parts, dim=1))
    assert torch.equal(layer(x[4:5].clone()), torch.cat(parts, dim=1)[4:5])


@pytest.mark.parametrize("rows", [1, 11])
def test_block_linear_gates_up_projection(kernels: Kernels, rows: int) -> None:
    gate, up = random_tensor("Q4_K", 75, 256, 1), random_tensor("Q4_K", 75, 256, 2)
    bias, x = torch.randn(150), torch.randn(rows, 256)
    y = BlockLinear(kernels, [gate, up], bias, gate=Gate())(x)
    g, u = (quantized_rows(x, "Q4_K") @ dequantized(t).T + b for t, b in zip((gate, up), bias.split(75), strict=True))
    torch.testing.assert_close(y.double(), torch.nn.functional.silu(g) * u, rtol=1e-4, atol=1e-5)


def test_block_linear_reorders_rows(kernels: Kernels) -> None:
    order = np.random.default_rng(3).permutation(64).astype(np.int32)
    tensor = random_tensor("Q6_K", 64, 256)
    x = torch.randn(2, 256)
    y = BlockLinear(kernels, [tensor._replace(order=order)], None)(x)
    assert torch.equal(y, BlockLinear(kernels, [tensor], None)(x)[:, torch.from_numpy(order).long()])


@pytest.mark.parametrize("type_name", TYPES)
def test_corrupt_scale_is_refused(kernels: Kernels, type_name: str) -> None:
    size = block_size(type_name)[1]
    values = [0xFF] if type_name == "MXFP4" else [0x7C, 0xFC, 0x7F]  # infinity, negative infinity, NaN
    for offset in HALVES.get(type_name, (0,)) or (-1,):
        for value in values:
            tensor = random_tensor(type_name, 5, 512)
            tensor.data.reshape(5, -1, size)[4, -1, offset + 1] = value
            assert not kernels.check_tensor(byref(tensor.native()), 512)
            with pytest.raises(ModelError, match="w is corrupt: a scale is not a finite number"):
                BlockLinear(
                    kernels,
                    [random_tensor(type_name, 5, 512)._replace(name="v"), tensor],
                    None,
                )
