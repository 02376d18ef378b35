"""Sizes of models from the headers of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.loading import precision
from syringa.engine.loading.model_size import ModelSize, estimate_model_size, gigabytes, read_model_size, read_size
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import catalog, describe, locate, read_gguf
from syringa.modelfiles.variants import HubName
from tests.engine.loading.gguf_files import HIDDEN, INTERMEDIATE, KV, MATRICES, VOCAB, quantized_bytes, write_gguf
from tests.engine.models.gguf_models import save_wide_gguf
from tests.modelfiles.gguf_builder import StoredTensor, Tensor, gguf, llama

LINEAR = sum(inputs * outputs for inputs, outputs in MATRICES.values())
EMBEDDING = HIDDEN * VOCAB
CHANNELS = HIDDEN + 2 * KV + HIDDEN + 2 * INTERMEDIATE + HIDDEN + VOCAB
NORMS = 3 * 4 * HIDDEN


def read(path: Path) -> ModelSize:
    files = locate(str(path))
    return read_model_size(files, describe(files))


@pytest.mark.parametrize("head", [False, True], ids=["tied", "untied"])
def test_size_of_gguf_file_counts_embedding_and_output_head(tmp_path: Path, head: bool) -> None:
    found = read(write_gguf(tmp_path / "m.gguf", head=head))
    assert (found.format, found.architecture, found.max_model_len) == ("GGUF Q4_K_M", "LlamaForCausalLM", 8192)
    assert found.parameters == LINEAR + EMBEDDING * (2 if head else 1)
    assert found.weights["int8"] == LINEAR + EMBEDDING + 4 * CHANNELS + 2 * EMBEDDING
    assert found.weights["bf16"] == 2 * (LINEAR + 2 * EMBEDDING)
    blocks = quantized_bytes(LINEAR, "Q4_K") + quantized_bytes(EMBEDDING, "Q6_K") * (2 if head else 1)
    assert found.weights["gguf"] == blocks + NORMS
    assert found.cache_bytes("gguf") == 2 * KV * 2
    assert found.cache_bytes("fp32") == 2 * KV * 4


def test_size_of_gguf_file_counts_tensors_that_become_int8(tmp_path: Path) -> None:
    plain = read(write_gguf(tmp_path / "a.gguf")).weights["gguf"]
    mlp = HIDDEN * INTERMEDIATE
    other = read(write_gguf(tmp_path / "b.gguf", ffn_down="Q2_K")).weights["gguf"]
    assert other - plain == mlp - quantized_bytes(mlp, "Q4_K")
    apart = read(write_gguf(tmp_path / "c.gguf", ffn_up="Q6_K")).weights["gguf"]  # gate and up run together
    assert apart - plain == 2 * (mlp - quantized_bytes(mlp, "Q4_K"))


@pytest.mark.parametrize("family", ["gemma2", "phi3", "qwen3moe", "gpt-oss", "mixtral"])
def test_size_of_native_gguf_file_is_that_of_its_blocks(tmp_path: Path, family: str) -> None:
    """Of those whose projections share a matrix, too, and of experts."""
    path = save_wide_gguf(tmp_path, family, "Q4_K")
    found = read(path)
    assert found.native
    stored = sum(info.size for info in read_gguf(str(path)).tensors.values())
    assert found.weights["gguf"] == pytest.approx(stored, rel=0.03)  # of a tiny model, routers and biases weigh more
    assert found.loading == {}


def test_size_of_gguf_file_names_types_that_become_int8(tmp_path: Path) -> None:
    assert not read(write_gguf(tmp_path / "a.gguf")).converted
    mlp = HIDDEN * INTERMEDIATE
    found = read(write_gguf(tmp_path / "b.gguf", ffn_down="Q2_K"))
    assert found.converted == {"Q2_K": quantized_bytes(mlp, "Q2_K")}
    assert found.converted_bytes == mlp
    plain = read(write_gguf(tmp_path / "c.gguf"))
    for head, each in ((False, 3), (True, 2)):  # bytes of a weight of the embedding, which is in bf16
        embedding = read(write_gguf(tmp_path / f"{head}.gguf", head=head, token_embd="Q2_K"))
        assert embedding.converted_bytes == each * EMBEDDING
        if not head:
            grown = embedding.weights["gguf"] - plain.weights["gguf"]
            assert grown == embedding.converted_bytes - quantized_bytes(EMBEDDING, "Q6_K")


def write_folder(path: Path, **config: Any) -> Path:
    path.mkdir()
    values = {
        "architectures": ["TestForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(values | config))
    (path / "tokenizer.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "BF16", "shape": [LINEAR + EMBEDDING]}}).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_size_of_native_folder(tmp_path: Path) -> None:
    found = read(write_folder(tmp_path / "m", model_type="llama"))
    assert found.native
    assert (found.format, found.gpu_dtype) == ("safetensors", "bf16")
    assert found.weights == {
        "int8": LINEAR + EMBEDDING + 4 * CHANNELS + 2 * EMBEDDING,
        "bf16": 2 * (LINEAR + 2 * EMBEDDING),
        "fp32": 4 * (LINEAR + 2 * EMBEDDING),
    }
    assert found.loading == {}
    assert found.cache_bytes("int8") == 2 * KV * 2


def test_size_of_folder_on_transformers_definition_covers_its_bf16_weights(tmp_path: Path) -> None:
    found = read(write_folder(tmp_path / "m", model_type="cohere2", head_dim=32))
    assert not found.native
    assert found.parameters == LINEAR + EMBEDDING
    assert found.weights["int8"] == LINEAR + EMBEDDING + 2 * EMBEDDING
    assert found.loading == {"int8": 2 * (LINEAR + EMBEDDING)}
    assert found.cache_bytes("bf16") == 2 * 2 * 32 * 2


def test_size_of_image_text_folder_reads_its_text_config(tmp_path: Path) -> None:
    text = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 3}
    found = read(write_folder(tmp_path / "m", model_type="gemma3", text_config=text, vision_config={}))
    assert found.cache_bytes("bf16") == 2 * 3 * 4 * 16 * 2


def test_size_of_quantized_folder_on_gpu(tmp_path: Path) -> None:
    found = read(write_folder(tmp_path / "m", model_type="llama", quantization_config={"quant_method": "fp8"}))
    assert (found.format, found.gpu_dtype) == ("FP8", "fp8")
    assert found.gpu_weights("auto") == found.parameters + EMBEDDING  # which is in bf16
    assert found.gpu_weights("bf16") == 2 * found.parameters


def test_cache_bytes_are_those_of_the_cache(tmp_path: Path) -> None:
    found = read(write_gguf(tmp_path / "m.gguf"))
    for dtype, kind in (("int8", torch.bfloat16), ("fp32", torch.float32)):
        assert found.cache_bytes(dtype) * BLOCK_SIZE == CacheTensors.bytes_per_block(1, 2, 64, kind)


@pytest.mark.parametrize("entry", catalog.CATALOG, ids=lambda entry: entry.name)
def test_estimate_of_catalog_model_has_the_bytes_of_its_file_and_cache(entry: catalog.CatalogModel) -> None:
    size = estimate_model_size(entry)
    assert size.cache_bytes("bf16") == entry.cache_bytes
    assert size.vocab_size == entry.vocabulary
    assert size.weights.get("gguf") == (entry.bytes if entry.kind == "generate" else None)
    assert 0.25 * size.weights["bf16"] < entry.bytes <= size.weights["fp32"]
    # The memory that is listed is that of the dtype that will be chosen.
    assert precision.choose_dtype(size, "auto", "avx2") == entry.dtype
    assert entry.memory == size.weights[entry.dtype] + entry.cache_bytes * min(entry.context, catalog.CONTEXT_SHOWN)


LAYOUTS = {  # types of the embedding and the output layer, of ffn_down, and of other matrices
    "Q8_0": ("Q8_0", "Q8_0", "Q8_0"),
    "Q4_K_M": ("Q6_K", "Q6_K", "Q4_K"),
}
BLOCKS = {"Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210)}  # number, values, bytes


def write_layout(path: Path, layout: str, *, tied: bool) -> catalog.CatalogModel:
    """Write a model whose embedding is large, and return how the catalog describes it."""
    hidden, inner, kv, vocabulary, layers = 512, 1024, 256, 2048, 2
    ends, down, other = LAYOUTS[layout]
    shapes = {"token_embd": (hidden, vocabulary, ends)} | ({} if tied else {"output": (hidden, vocabulary, ends)})
    for layer in range(layers):
        matrices = {"attn_q": (hidden, hidden), "attn_k": (hidden, kv), "attn_v": (hidden, kv)}
        matrices |= {"attn_output": (hidden, hidden), "ffn_gate": (hidden, inner), "ffn_up": (hidden, inner)}
        shapes |= {f"blk.{layer}.{name}": (*shape, other) for name, shape in matrices.items()}
        shapes[f"blk.{layer}.ffn_down"] = (inner, hidden, down)
    tensors: dict[str, Tensor] = {"output_norm.weight": (hidden,)}
    for name, (inputs, outputs, kind) in shapes.items():
        number, values, size = BLOCKS[kind]
        tensors[f"{name}.weight"] = StoredTensor((inputs, outputs), number, bytes(inputs * outputs // values * size))
    tensors |= {f"blk.{layer}.{name}_norm.weight": (hidden,) for layer in range(layers) for name in ("attn", "ffn")}
    tokens = ["<|endoftext|>", "<|im_end|>", *map(str, range(vocabulary - 2))]
    metadata = llama(
        llama__block_count=layers,
        llama__embedding_length=hidden,
        llama__feed_forward_length=inner,
        llama__attention__head_count=8,
        llama__attention__head_count_kv=4,
        llama__context_length=4096,
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[3, 3, *[1] * (vocabulary - 2)],
    )
    path.write_bytes(gguf(metadata, tensors))
    numbers = sum(inputs * outputs for inputs, outputs, _ in shapes.values())
    return catalog.CatalogModel(
        name="small",
        source=HubName("org/small-GGUF", layout),
        parameters=f"{numbers / 1e6:.3f}M",
        bytes=path.stat().st_size,
        cache_bytes=2 * layers * kv * 2,
        context=4096,
        license="MIT",
        vocabulary=vocabulary,
        hidden=hidden,
        tied=tied,
        dtype="int8" if layout == "Q8_0" else "gguf",
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_estimate_of_catalog_model_agrees_with_its_file(
    layout: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = write_layout(tmp_path / "m.gguf", layout, tied=tied)
    found, estimate = read(tmp_path / "m.gguf"), estimate_model_size(entry)
    assert estimate.weights == {dtype: pytest.approx(size, rel=0.03) for dtype, size in found.weights.items()}
    assert estimate.cache_bytes("bf16") == found.cache_bytes("bf16")
    assert (estimate.native, estimate.vocab_size, estimate.loading) == (found.native, found.vocab_size, found.loading)
    monkeypatch.setattr(precision, "MIN_GGUF_PARAMETERS", 0)
    for size in (found, estimate):
        assert precision.choose_dtype(size, "auto", "avx2") == entry.dtype
    assert entry.memory == pytest.approx(found.weights[entry.dtype] + 4096 * entry.cache_bytes, rel=0.03)


def test_read_size_of_unreadable_model_is_none(tmp_path: Path) -> None:
    assert read_size("/no/such/model") is None
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert read_size(str(tmp_path / "m.gguf")) is None
    folder = write_folder(tmp_path / "m", model_type="llama", num_attention_heads="many")
    assert read_size(str(folder)) is None


@pytest.mark.parametrize("value", [None, "128", 0, 1.5, [4]])
@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_tok", "moe_intermediate_size"])
def test_read_size_of_malformed_experts_is_none(tmp_path: Path, key: str, value: Any) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    folder = write_folder(tmp_path / "m", **({"model_type": "qwen3_moe"} | experts | {key: value}))
    assert read_size(str(folder)) is None
    with pytest.raises(ModelError, match=r"config\.json"):
        read(folder)


@pytest.mark.parametrize("config", [{"num_attention_heads": "many"}, {"hidden_size": None}, {"num_attention_heads": 0}])
def test_size_of_malformed_config_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read(write_folder(tmp_path / "m", model_type="llama", **config))


def test_choose_dtype_of_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, folder = read(write_gguf(tmp_path / "m.gguf")), read(write_folder(tmp_path / "m", model_type="llama"))
    assert precision.choose_dtype(file, "auto", "avx512") == "int8"  # a small model
    monkeypatch.setattr(precision, "MIN_GGUF_PARAMETERS", file.parameters)
    assert precision.choose_dtype(file, "auto", "avx512") == "gguf"
    assert precision.choose_dtype(file, "auto", "base") == "int8"
    assert precision.choose_dtype(folder, "auto", "avx512") == "int8"
    with pytest.raises(ConfigError, match="--dtype gguf is for GGUF files, and m is not one"):
        precision.choose_dtype(folder, "gguf", "avx512")


def test_gigabytes() -> None:
    shown = [gigabytes(size) for size in (980_000_000, 9_994_999_999, 18_234_000_000, -5)]
    assert shown == ["0.98 GB", "9.99 GB", "18.2 GB", "0.00 GB"]
