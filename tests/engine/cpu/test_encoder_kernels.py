"""The kernels of encoders, in every built variant: norm, GELU, packed attention and pooling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from syringa.engine.cpu.native import Kernels
from syringa.engine.embedding.batch import PackedBatch, pack_inputs
from syringa.engine.embedding.encoder import Norm
from syringa.engine.embedding.encoder_config import EncoderConfig
from syringa.engine.embedding.heads import NativePooling, TorchPooling
from syringa.engine.embedding.native_ops import NativeEncoderOps
from syringa.modelfiles.embedding import Pooling
from tests.engine.cpu.test_native import VARIANTS, variant

pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels were built: there was no compiler")
LENGTHS = (1, 2, 15, 16, 17, 33, 64, 65, 150)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return variant(request.param)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def config(heads: int, head_size: int) -> EncoderConfig:
    return EncoderConfig("", heads * head_size, 1, heads, 1, 1, 1, 1, 1e-5)


def ops(kernels: Kernels, *, half: bool = False, heads: int = 3, head_size: int = 32) -> NativeEncoderOps:
    return NativeEncoderOps(kernels, config(heads, head_size), half=half)


def batch(lengths: tuple[int, ...] = LENGTHS) -> PackedBatch:
    return pack_inputs([[1] * length for length in lengths])


@pytest.mark.parametrize("size", [384, 100, 7])
def test_layer_norm_equals_torch(kernels: Kernels, size: int) -> None:
    x = torch.randn(50, size) * 3 + 5
    norm = Norm(torch.randn(size), torch.randn(size), 1e-5)
    expected = F.layer_norm(x.double(), (size,), norm.weight.double(), norm.bias.double(), norm.eps).float()
    torch.testing.assert_close(ops(kernels).layer_norm(x, norm), expected, atol=1e-5, rtol=1e-5)


def test_gelu_equals_torch(kernels: Kernels) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, 1e-30, -1e30, 1e30])])[None]
    expected = F.gelu(x.double()).float()
    torch.testing.assert_close(ops(kernels).gelu(x.clone()), expected, atol=3e-6, rtol=1e-6)
    assert ops(kernels).gelu(torch.tensor([[float("nan")]])).isnan().all()


@pytest.mark.parametrize(("heads", "head_size"), [(3, 32), (2, 64), (1, 16), (2, 48), (1, 128)])
@pytest.mark.parametrize("half", [False, True])
def test_packed_attention_equals_torch_and_does_not_mix_sequences(
    kernels: Kernels, half: bool, heads: int, head_size: int
) -> None:
    packed, width = batch(), heads * head_size
    qkv = torch.randn(sum(LENGTHS), 3 * width) * 2
    got = ops(kernels, half=half, heads=heads, head_size=head_size).attention(qkv, packed)
    for begin, end in zip(packed.starts[:-1], packed.starts[1:], strict=True):
        q, k, v = qkv[begin:end].double().view(-1, 3, heads, head_size).permute(1, 2, 0, 3)
        expected = F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1).float()
        error = (got[begin:end] - expected).abs().max() / expected.abs().max()
        assert float(error) < (0.02 if half else 1e-5), (begin, end)


@pytest.mark.parametrize("half", [False, True])
def test_packed_attention_gives_a_sequence_the_same_bits_alone(kernels: Kernels, half: bool) -> None:
    packed, own = batch(), ops(kernels, half=half)
    qkv = torch.randn(sum(LENGTHS), 3 * 96)
    together = own.attention(qkv, packed)
    for length, begin in zip(LENGTHS, packed.starts, strict=False):
        alone = own.attention(qkv[begin : begin + length].contiguous(), batch((length,)))
        assert torch.equal(alone, together[begin : begin + length])


def test_packed_attention_reads_no_numbers_of_a_batch_before(kernels: Kernels) -> None:
    own = ops(kernels)
    own.attention(torch.full((64, 3 * 96), float("nan")), batch((64,)))
    assert own.attention(torch.randn(5, 3 * 96), batch((5,))).isfinite().all()


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"])
@pytest.mark.parametrize("size", [384, 30])
def test_pooling_equals_torch(kernels: Kernels, pooling: Pooling, size: int) -> None:
    x = torch.randn(sum(LENGTHS), size)
    pooled = NativePooling(kernels).pool(x, batch(), pooling)
    torch.testing.assert_close(pooled, TorchPooling().pool(x, batch(), pooling), atol=1e-5, rtol=1e-5)
    normalized = NativePooling(kernels).normalize(pooled.clone())
    torch.testing.assert_close(normalized, TorchPooling().normalize(pooled), atol=1e-6, rtol=1e-5)


def test_pooling_by_the_root_of_the_length_is_that_of_sentence_transformers(kernels: Kernels) -> None:
    x = torch.randn(sum(LENGTHS), 30)
    expected = torch.stack([part.sum(0) / len(part) ** 0.5 for part in x.split(LENGTHS)])
    for pooling in (NativePooling(kernels), TorchPooling()):
        torch.testing.assert_close(pooling.pool(x, batch(), "mean_sqrt_len_tokens"), expected, atol=1e-5, rtol=1e-5)


def test_zero_vector_stays_zero(kernels: Kernels) -> None:
    assert torch.equal(NativePooling(kernels).normalize(torch.zeros(2, 20)), torch.zeros(2, 20))


def test_linear_layer_stores_the_gelu_of_its_product(kernels: Kernels) -> None:
    from syringa.engine.cpu.layers.linear import Int8Linear

    layer = Int8Linear(kernels, torch.randn(70, 64), torch.randn(70))
    x = torch.randn(9, 64)
    product, out = layer(x), torch.empty(9, 70)
    kernels.linear(layer.address, x.data_ptr(), 9, out.data_ptr(), layer.bias_address, 2)
    torch.testing.assert_close(out, F.gelu(product), atol=3e-6, rtol=1e-6)
