"""The bytes that the native decoder's weights take on a GPU. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping

from syringa.engine.models.config import DecoderConfig
from syringa.modelfiles.safetensors_headers import StoredTensor

GPU_BYTES_PER_WEIGHT = {"bf16": 2.0, "fp8": 1.0, "int4": 0.6, "mxfp4": 0.6}  # scales included
GPU_OVERHEAD = 3 << 30  # beside weights and cache: CUDA context, CUDA graphs, and activations of the largest step
MIN_GPU_OVERHEAD = 1 << 30  # a worker refuses weights that leave less
_BF16_BYTES, _FP32_BYTES = 2, 4
_PACKED_BYTES, _NUMBERS_PER_WORD = 4, 8  # of 4-bit numbers in an int32
_FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PARAMETER = re.compile(r"(?:model\.)?(?:language_model\.)?(?:layers\.(\d+)|embed_tokens|norm|lm_head)\..+")
_SCALES = re.compile(r"(.*\.)(weight_scale|weight_scale_inv|scales)")


def count_kept(config: DecoderConfig, dtype: str) -> int:
    """Return how many weights are in bf16 on a GPU, whatever `dtype` the others have."""
    embedding = config.vocab * config.hidden * (1 if config.tied else 2)
    if dtype != "mxfp4":
        return embedding + sum(config.sparse) * config.experts * config.hidden
    # Only experts are in MXFP4.
    attention = config.hidden * config.head_size * (2 * config.heads + 2 * config.kv_heads)
    return embedding + config.layers * attention + sum(config.sparse) * config.experts * config.hidden


def count_stored_bytes(tensors: Mapping[str, StoredTensor], config: DecoderConfig) -> int:
    """Return the bytes on a GPU of a quantized folder's weights that stay as they are stored; 0 if it has none.

    Parts of a layer that are converted because others are quantized otherwise count as stored.
    """
    total = 0
    for name, tensor in tensors.items():
        match = _PARAMETER.fullmatch(name)
        # Vision towers and layers for multi-token prediction are not read, nor is a head that is the embedding.
        if match is None or (match[1] and int(match[1]) >= config.layers) or (config.tied and "lm_head." in name):
            continue
        total += _loaded_bytes(name, tensor, tensors)
    return total


def _loaded_bytes(name: str, tensor: StoredTensor, tensors: Mapping[str, StoredTensor]) -> int:
    count, last = tensor.elements, name.rpartition(".")[2]
    if tensor.dtype == "F8_E4M3" or last.endswith("_blocks"):
        return count
    if last.endswith("_scales"):  # of MXFP4: powers of two become bf16
        return count * _BF16_BYTES
    if last in ("qweight", "weight_packed"):
        return count * _PACKED_BYTES
    if last in ("qzeros", "weight_zero_point"):  # a byte for each
        return count * _NUMBERS_PER_WORD
    if match := _SCALES.fullmatch(name):
        matrix = tensors.get(f"{match[1]}weight")
        if matrix is None:
            return count * _FLOAT_BYTES.get(tensor.dtype, _FP32_BYTES)
        # A scale for each output, also of those that share one in the file.
        groups = tensor.shape[1] if len(tensor.shape) == len(matrix.shape) == 2 else 1
        return (matrix.shape[0] if matrix.shape else 0) * groups * _FP32_BYTES
    if tensor.dtype not in _FLOAT_BYTES or last.endswith(("input_scale", "k_scale", "v_scale")):
        return 0
    return count * (_BF16_BYTES if len(tensor.shape) > 1 else _FP32_BYTES)
