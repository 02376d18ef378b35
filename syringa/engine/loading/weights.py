"""Read weights by their Hugging Face names from safetensors folders and GGUF files.

GGUF tensors are dequantized to fp32 here (`GgufWeights`), except with dtype gguf, which takes their blocks as they
are. With dtype int8, `Int8Linear` then quantizes them again.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from syringa.engine.cpu.layers.linear import BlockTensor
from syringa.engine.cpu.native import BLOCK_TYPES
from syringa.engine.models.quantization import read_quantization
from syringa.errors import ModelError
from syringa.modelfiles import SAFETENSORS_INDEX, ModelFiles
from syringa.modelfiles.gguf import GgufFile, TensorInfo, read_gguf

if TYPE_CHECKING:
    from syringa.engine.loading.quantized import QuantizedWeight

GGUF_TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
MXFP4_SUFFIXES = ("_blocks", "_scales")  # returned as stored: `gpu.expert_loading` dequantizes them
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# GGUF architectures whose q and k rows are ordered for interleaved rotary pairs; the rest use halves, as transformers.
INTERLEAVED_ROPE = ("llama", "smollm3")


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def __call__(self, name: str) -> torch.Tensor:
        """Return a tensor. Raise `ModelError` if it is missing or cannot be read."""
        ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        """Return a weight as it is stored, on `device`; None if it is not quantized, or not in a way that can stay."""
        ...


def open_weights(files: ModelFiles, config: dict[str, Any]) -> WeightSource:
    if files.kind == "gguf":
        return GgufWeights(files, config)
    folder = SafetensorsWeights(Path(files.path))
    quantization = read_quantization(config)
    if quantization is None:
        return folder
    from syringa.engine.loading.quantized import QuantizedWeights

    return QuantizedWeights(folder, quantization)


class GgufWeights:
    """Tensors of a GGUF file, dequantized to fp32 when they are read, or as quantized blocks."""

    def __init__(self, files: ModelFiles, config: dict[str, Any]) -> None:
        self.file: GgufFile = read_gguf(files.path)
        parts = {info.file for info in self.file.tensors.values()}
        self.data = {part: np.memmap(part, mode="r", dtype=np.uint8) for part in parts}
        self.interleaved = self.file.metadata.get("general.architecture") in INTERLEAVED_ROPE
        self.heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self.file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self.file.tensors[_gguf_name(name)].shape))

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        return None

    def __call__(self, name: str) -> torch.Tensor:
        info = self.file.tensors.get(_gguf_name(name))
        if info is None:
            raise ModelError(f"{self.file.path} has no tensor {_gguf_name(name)!r}: the model is incomplete")
        tensor = torch.from_numpy(self._dequantize(info).reshape(self.shape(name)))
        heads = self._interleaved_heads(name)
        return _deinterleave_rope(tensor, heads) if heads else tensor

    def blocks(self, name: str) -> BlockTensor | None:
        """Return a matrix as it is quantized in the file; None if the compiled kernels cannot multiply its type."""
        info = self.file.tensors.get(_gguf_name(name))
        if info is None or info.type not in BLOCK_TYPES or len(info.shape) != 2:
            return None
        inputs, rows = info.shape
        order = None
        if heads := self._interleaved_heads(name):
            order = _deinterleave_rope(torch.arange(rows, dtype=torch.int32), heads).numpy()
        data = self.data[info.file][info.offset : info.offset + info.size]
        return BlockTensor(f"{self.file.path}: {info.name}", info.type, rows, inputs, data, order)

    def block_bytes(self) -> int:
        """Return the size of the model with the tensors that `blocks` returns as they are and the rest in int8."""
        tensors = self.file.tensors.values()
        return sum(info.size if info.type in BLOCK_TYPES else math.prod(info.shape) for info in tensors)

    def _interleaved_heads(self, name: str) -> int:
        """Return the number of heads if a tensor's rows are in pairs for the rotary embedding, else 0."""
        match = re.search(r"self_attn\.([qk])_proj", name)
        return int(self.heads[match[1]]) if match and self.interleaved else 0

    def _dequantize(self, info: TensorInfo) -> np.ndarray:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        raw = self.data[info.file][info.offset : info.offset + info.size]
        try:
            kind = GGMLQuantizationType[info.type]
            if info.type == "F32":
                values = raw.view(np.float32)
            elif info.type == "F16":
                values = raw.view(np.float16).astype(np.float32)
            else:
                rows = int(np.prod(info.shape[1:], dtype=np.int64))
                with np.errstate(invalid="ignore", over="ignore"):  # corrupt scales are reported below
                    values = dequantize(raw.reshape(rows, -1), kind)
        except (KeyError, NotImplementedError):
            raise ModelError(f"{self.file.path}: tensors of type {info.type} cannot be read yet") from None
        if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):
            raise ModelError(
                f"{self.file.path}: {info.name} is corrupt: a weight is not a finite number; fetch the file again"
            )
        return np.array(values, dtype=np.float32, copy=info.type == "F32")


def _gguf_name(name: str) -> str:
    if match := LAYER_TENSOR.fullmatch(name):
        return f"blk.{match[1]}.{GGUF_LAYER_TENSORS.get(match[2], match[2])}.{match[3]}"
    return GGUF_TENSORS.get(name, name)


def _deinterleave_rope(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of each head from interleaved pairs (0, 1), (2, 3), … to halves."""
    size = tensor.shape[0] // heads
    return tensor.view(heads, size // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


class SafetensorsWeights:
    """Tensors of a safetensors file, or of shards with an index."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / SAFETENSORS_INDEX
        if index.exists():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        self.folder = folder
        self.files = {}
        for file in names:
            try:
                opened = safe_open(folder / file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{folder / file} cannot be read: {error}") from None
            self.files.update(dict.fromkeys(opened.keys(), opened))

    def has(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        return None

    def dtype(self, name: str) -> str:
        """Return the dtype as safetensors names it."""
        return str(self.files[name].get_slice(name).get_dtype())

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor as it is stored. Raise `ModelError` if it is missing."""
        if name not in self.files:
            raise ModelError(f"{self.folder} has no tensor {name!r}: the model is incomplete")
        tensor: torch.Tensor = self.files[name].get_tensor(name)
        return tensor

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self.read(name)
        if tensor.dtype == torch.uint8 and name.endswith(MXFP4_SUFFIXES):
            return tensor
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(
                f"{self.folder}: {name} is {tensor.dtype}, and config.json does not say how it is quantized: "
                "use the original folder, or a GGUF file"
            )
        return tensor
