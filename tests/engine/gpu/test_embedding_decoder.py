"""Embedding models that are decoders, on the GPU decoder with reference operations, against `transformers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from syringa.engine.embedding.gpu_decoder import GpuDecoderEncoder, load_gpu_decoder_encoder
from syringa.engine.embedding.heads import PooledModel, TorchPooling
from syringa.engine.embedding.size import is_native_embedding
from syringa.engine.embedding.weights import LayerReader, PrefixedWeights
from syringa.engine.loading.weights import SafetensorsWeights
from syringa.modelfiles import describe, locate
from tests.engine.embedding.tiny_encoders import INPUTS, TinyEncoder, reference, save_encoder, vectors


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> TinyEncoder:
    return save_encoder(tmp_path_factory.mktemp("qwen3"), "Qwen3", pooling="lasttoken")


def load_encoder(folder: Path) -> GpuDecoderEncoder:
    weights = PrefixedWeights(SafetensorsWeights(folder), str(folder), "model.")
    reader = LayerReader(weights, str(folder), "fp32", None, torch.device("cpu"))
    return load_gpu_decoder_encoder(weights, describe(locate(str(folder))).config, reader, 128)


def test_gpu_decoder_gives_vectors_of_transformers(qwen3: TinyEncoder) -> None:
    encoder = load_encoder(qwen3.folder)
    model = PooledModel(encoder, TorchPooling(), "lasttoken", [], normalize=True)
    expected = reference(qwen3.model, INPUTS, "lasttoken")
    for count in (2, len(INPUTS), 1):  # the cache grows, and is used again by a smaller batch
        got = vectors(model, INPUTS[:count])
        torch.testing.assert_close(got, expected[:count], atol=2e-5, rtol=0)


def test_gpu_decoder_keeps_keys_and_values_of_one_layer(qwen3: TinyEncoder) -> None:
    encoder = load_encoder(qwen3.folder)
    vectors(PooledModel(encoder, TorchPooling(), "mean", [], normalize=False), INPUTS)
    cache = encoder._cache
    assert cache is not None
    assert cache.keys.shape[:2] == (1, sum(-(-len(tokens) // 16) for tokens in INPUTS))
    assert len(cache.layers) == 3


@pytest.mark.parametrize(
    ("changes", "native"),
    [
        ({}, True),
        ({"is_causal": False}, False),
        ({"use_bidirectional_attention": True}, False),
        ({"quantization_config": {"quant_method": "gptq"}}, False),
        ({"model_type": "qwen3_moe"}, False),
        ({"model_type": "bert", "hidden_act": "gelu"}, True),
    ],
)
def test_decoders_are_native_if_they_are_causal(qwen3: TinyEncoder, changes: dict[str, object], native: bool) -> None:
    assert is_native_embedding(describe(locate(str(qwen3.folder))).config | changes) is native
