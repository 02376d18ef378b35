"""The memory that a model takes, from the headers of its files. Imports no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from syringa.engine.cpu.native import BLOCK_TYPES
from syringa.engine.embedding.size import embedding_weights, is_native_embedding, step_bytes
from syringa.engine.loading.gpu_size import GPU_BYTES_PER_WEIGHT, count_kept, count_stored_bytes
from syringa.engine.models.config import DecoderConfig, count_parameters, is_native, read_config
from syringa.engine.models.quantization import stored_dtype
from syringa.errors import ModelError
from syringa.modelfiles import (
    EmbeddingSpec,
    GgufFile,
    ModelDescription,
    ModelFiles,
    count_weights,
    describe,
    locate,
    read_embedding_spec,
    read_gguf,
)
from syringa.modelfiles.catalog import CatalogModel, WheelFolder
from syringa.modelfiles.safetensors_headers import read_headers
from syringa.types import ModelKind

CACHE_ITEM_BYTES = {"fp32": 4, "fp8": 1}  # of a number in the KV cache; of other dtypes: CACHE_DEFAULT_BYTES
CACHE_DEFAULT_BYTES = 2
_CPU_BYTES_PER_WEIGHT = {"int8": 1, "bf16": 2, "fp32": 4}
_SCALE_BYTES = 4  # of an output channel in int8
_HALF_BYTES = 2

_GATE_OR_UP = re.compile(r"ffn_(gate|up)(_exps|_shexp)?\.")
_IN_FP32 = re.compile(r"ffn_gate_inp|ssm_conv1d|\.bias$")  # routers, convolutions and biases, whatever their shape

# general.file_type of GGUF files.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4", 39: "NVFP4",
}  # fmt: skip
_FOLDER_FORMATS = {"bf16": "safetensors", "fp8": "FP8", "int4": "4-bit safetensors", "mxfp4": "MXFP4"}


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a model in memory, in bytes unless it says otherwise."""

    name: str
    architecture: str  # the Hugging Face class
    format: str  # of its files: "GGUF Q4_K_M", "safetensors"
    parameters: int
    native: bool  # whether the native decoder runs it
    weights: dict[str, int]  # on a CPU, by dtype
    file_bytes: int = 0  # of a GGUF file's tensors, those that cannot stay quantized in int8; 0: a folder
    converted: dict[str, int] = {}  # by type: of a GGUF file's matrices that no kernel multiplies, and that grow
    converted_bytes: int = 0  # of those matrices with dtype gguf or int8
    loading: dict[str, int] = {}  # of the weights while they are read, by dtype, where that is more
    gpu_dtype: str = "bf16"  # of the weights on a GPU with `--dtype auto`
    gpu_kept: int = 0  # weights that are in bf16 on a GPU whatever the dtype is, such as those of the embedding
    gpu_stored: int = 0  # of the weights on a GPU in `gpu_dtype`, if they are quantized in the files; 0: unknown
    cache_numbers: int = 0  # in the KV cache, per token; 0: unknown
    state_bytes: int = 0  # of a sequence in the state cache of a hybrid model
    max_model_len: int
    vocab_size: int = 0
    kind: ModelKind = "generate"
    step_bytes: int = 0  # of an embedding model: its largest step, which is all that it holds beside the weights

    def cache_bytes(self, dtype: str) -> int:
        """Return the bytes of a token in the KV cache."""
        return self.cache_numbers * CACHE_ITEM_BYTES.get(dtype, CACHE_DEFAULT_BYTES)

    def gpu_weights(self, dtype: str) -> int:
        """Return the bytes of the weights on a GPU."""
        dtype = self.gpu_dtype if dtype == "auto" else dtype
        if dtype == self.gpu_dtype and self.gpu_stored:
            return self.gpu_stored
        kept = min(self.gpu_kept, self.parameters)
        return int((self.parameters - kept) * GPU_BYTES_PER_WEIGHT[dtype] + kept * _HALF_BYTES)


def read_model_size(files: ModelFiles, description: ModelDescription) -> ModelSize:
    """Read the sizes of a model. Raise `ModelError` if its files are malformed."""
    config = description.config
    if (spec := read_embedding_spec(files)) is not None:
        return _read_embedding_size(files, description, spec)
    native = is_native(config)
    file = read_gguf(files.path) if files.kind == "gguf" else None
    decoder = read_config(config) if native else None
    parameters = count_parameters(decoder) if decoder is not None else _count(files)
    gpu_dtype = stored_dtype(config) if native and file is None else "bf16"
    inner = _text_config(config)
    embedding = _integer(inner, "vocab_size") * _integer(inner, "hidden_size", "n_embd")
    tied = decoder.tied if decoder is not None else bool(inner.get("tie_word_embeddings", True))
    if decoder is not None:
        weights, loading = _native_weights(decoder, parameters), {}
    else:
        # Quantized from bf16, except the embedding. Other dtypes share a tied embedding with the output head.
        weights = {dtype: parameters * size for dtype, size in _CPU_BYTES_PER_WEIGHT.items()}
        weights["int8"] += embedding * (_HALF_BYTES if tied else _HALF_BYTES - 1)
        loading = {"int8": parameters * _HALF_BYTES}
    if file is not None:
        weights["gguf"] = _block_weights(file, native)
        if not native:  # transformers reads what is not in blocks in bf16
            loading["gguf"] = sum(
                info.size if info.type in BLOCK_TYPES else math.prod(info.shape) * _HALF_BYTES
                for info in file.tensors.values()
            )
    converted, converted_bytes = _converted(file) if file is not None else ({}, 0)
    return ModelSize(
        name=description.name,
        architecture=description.architecture,
        format=_format(file, gpu_dtype),
        parameters=parameters,
        native=native,
        weights=weights,
        file_bytes=_file_bytes(file) if file is not None else 0,
        converted=converted,
        converted_bytes=converted_bytes,
        loading=loading,
        gpu_dtype=gpu_dtype,
        gpu_kept=count_kept(decoder, gpu_dtype) if decoder is not None else 0,
        gpu_stored=_stored_bytes(files, decoder) if decoder is not None and gpu_dtype != "bf16" else 0,
        cache_numbers=_cache_numbers(inner, decoder),
        state_bytes=_state_bytes(decoder),
        max_model_len=description.max_model_len,
        vocab_size=_integer(inner, "vocab_size"),
    )


def estimate_model_size(entry: CatalogModel) -> ModelSize:
    """Return about what `read_model_size` will find for a model of the catalog, before its files are there."""
    folder = isinstance(entry.source, WheelFolder)
    return ModelSize(
        name=entry.name,
        architecture="",
        format="safetensors" if folder else "GGUF",
        parameters=entry.numbers,
        native=True,
        weights=entry.weights,
        file_bytes=0 if folder else entry.bytes,
        cache_numbers=entry.cache_bytes // CACHE_DEFAULT_BYTES,
        max_model_len=entry.context,
        vocab_size=entry.vocabulary,
        kind=entry.kind,
    )


def _read_embedding_size(files: ModelFiles, description: ModelDescription, spec: EmbeddingSpec) -> ModelSize:
    config, parameters, native = description.config, _count(files), is_native_embedding(description.config)
    hidden, vocabulary = _integer(config, "hidden_size", "dim", "n_embd"), _integer(config, "vocab_size")
    inner = _integer(config, "intermediate_size", "hidden_dim", "n_inner") or 4 * hidden
    return ModelSize(
        name=description.name,
        architecture=spec.architecture,
        format="safetensors",
        parameters=parameters,
        native=native,
        weights=embedding_weights(parameters, vocabulary * hidden, spec),
        loading={} if native else {"int8": parameters * _HALF_BYTES},
        max_model_len=spec.max_length,
        vocab_size=vocabulary,
        kind=spec.kind,
        step_bytes=step_bytes(hidden, inner, spec.max_length),
    )


def read_size(model: str) -> ModelSize | None:
    """Return the sizes of a model by its name; None if its files cannot be read.

    Its worker reports why, and the supervisor must survive any file.
    """
    try:
        files = locate(model)
        return read_model_size(files, describe(files))
    except Exception:
        return None


def gigabytes(size: int) -> str:
    """Return a number of bytes in GB, for people."""
    return f"{max(0, size) / 1e9:.2f} GB" if size < 9_995_000_000 else f"{size / 1e9:,.1f} GB"


def _count(files: ModelFiles) -> int:
    """Return the number of weights; 0 if the files cannot be read, which their loader reports."""
    try:
        return count_weights(files)
    except ModelError:
        return 0


def _stored_bytes(files: ModelFiles, decoder: DecoderConfig) -> int:
    """Return the bytes of a quantized folder on a GPU; 0 if the files cannot be read, or are not here yet."""
    try:
        return count_stored_bytes(read_headers(Path(files.path)), decoder)
    except ModelError:
        return 0


def _native_weights(c: DecoderConfig, parameters: int) -> dict[str, int]:
    """Return the bytes of the native decoder's weights by dtype: a tied embedding is held as output head too."""
    embedding = c.vocab * c.hidden
    linear = parameters if c.tied else parameters - embedding
    channels = c.layers * ((c.heads + 2 * c.kv_heads) * c.head_size + 2 * c.hidden + 2 * c.intermediate) + c.vocab
    channels += sum(c.sparse) * c.experts * (2 * c.expert_intermediate + 2 * c.hidden)  # with the router, in fp32
    return {
        "int8": linear + channels * _SCALE_BYTES + embedding * _HALF_BYTES,
        "bf16": (linear + embedding) * _HALF_BYTES,
        "fp32": (linear + embedding) * 4,
    }


def _file_bytes(file: GgufFile) -> int:
    """Return the bytes of a file's tensors, those that cannot stay quantized in int8."""
    tensors = file.tensors.values()
    return sum(info.size if info.type in BLOCK_TYPES else math.prod(info.shape) for info in tensors)


def _block_weights(file: GgufFile, native: bool) -> int:
    """Return the bytes of a file's tensors with dtype gguf: in blocks, and otherwise as int8 or fp32."""
    tensors, total = file.tensors, 0
    for name, info in tensors.items():
        elements = math.prod(info.shape)
        stays = info.type in BLOCK_TYPES
        if native and (match := _GATE_OR_UP.search(name)):  # run together, so they stay only if both do
            other = "up" if match[1] == "gate" else "gate"
            pair = name.replace(f"ffn_{match[1]}", f"ffn_{other}")
            stays = stays and (pair not in tensors or tensors[pair].type == info.type)
        if len(info.shape) < 2 or (native and _IN_FP32.search(name)):
            total += elements * 4
        elif name == "token_embd.weight":
            total += info.size if stays else elements * _HALF_BYTES
            if "output.weight" not in tensors and not stays:  # a tied output layer has the same blocks
                total += elements
        else:
            total += info.size if stays else elements
    return total


def _converted(file: GgufFile) -> tuple[dict[str, int], int]:
    """Return the bytes of the matrices whose types become a larger one: in the file, by type, and in memory."""
    sizes: Counter[str] = Counter()
    total = 0
    for name, info in file.tensors.items():
        elements = math.prod(info.shape)
        if len(info.shape) < 2 or info.type in BLOCK_TYPES or info.size >= elements:
            continue
        sizes[info.type] += info.size
        total += elements
        if name == "token_embd.weight":  # in bf16, beside a tied output layer in int8
            total += elements if "output.weight" in file.tensors else elements * _HALF_BYTES
    return dict(sizes.most_common()), total


def _cache_numbers(config: dict[str, Any], decoder: DecoderConfig | None) -> int:
    if decoder is not None:
        return 2 * decoder.attention_layers * decoder.kv_heads * decoder.head_size
    heads = _integer(config, "num_attention_heads", "n_head")
    size = _integer(config, "head_dim") or (_integer(config, "hidden_size", "n_embd") // heads if heads else 0)
    layers, kv_heads = _integer(config, "num_hidden_layers", "n_layer"), _integer(config, "num_key_value_heads")
    return 2 * layers * (kv_heads or heads) * size


def _state_bytes(decoder: DecoderConfig | None) -> int:
    if decoder is None or decoder.delta_net is None:
        return 0
    return sum(decoder.linear) * decoder.delta_net.state_bytes


def _format(file: GgufFile | None, gpu_dtype: str) -> str:
    if file is None:
        return _FOLDER_FORMATS[gpu_dtype]
    bytes_by_type: Counter[str] = Counter()
    for info in file.tensors.values():
        bytes_by_type[info.type] += info.size
    most = max(bytes_by_type, key=bytes_by_type.__getitem__, default="")
    stated = file.metadata.get("general.file_type")
    return f"GGUF {_FILE_TYPES.get(stated, most) if isinstance(stated, int) else most}".rstrip()


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _integer(config: dict[str, Any], *names: str) -> int:
    """Return the first of these values that is a positive integer, or 0."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)
