"""Weights by their Hugging Face names, whatever the file: safetensors folders and GGUF files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from syringa.errors import ModelError
from syringa.modelfiles import INDEX, ModelFiles
from syringa.modelfiles.gguf import GgufFile, read_gguf

GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
GGUF_LAYER_NAMES = {
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
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
# These GGUF architectures store q and k for pairs of neighbouring components; the rest for halves, as transformers.
PERMUTED = ("llama", "smollm3")


class WeightSource(Protocol):
    def __call__(self, name: str) -> torch.Tensor: ...

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...


def open_weights(files: ModelFiles, config: dict[str, Any]) -> WeightSource:
    return GgufWeights(files, config) if files.kind == "gguf" else SafetensorsWeights(Path(files.path))


class GgufWeights:
    """Tensors are dequantized to fp32 one at a time, as they are asked for."""

    def __init__(self, files: ModelFiles, config: dict[str, Any]) -> None:
        self.file: GgufFile = read_gguf(files.path)
        self.data = np.memmap(files.path, mode="r", dtype=np.uint8)
        self.permuted = self.file.metadata.get("general.architecture") in PERMUTED
        self.heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}

    def has(self, name: str) -> bool:
        return _gguf_name(name) in self.file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self.file.tensors[_gguf_name(name)].shape))

    def __call__(self, name: str) -> torch.Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.file.tensors.get(_gguf_name(name))
        if info is None:
            raise ModelError(f"{self.file.path} has no tensor {_gguf_name(name)!r}: the model is incomplete")
        raw = self.data[info.offset : info.offset + info.size]
        try:
            kind = GGMLQuantizationType[info.type]
            if info.type == "F32":
                values = raw.view(np.float32)
            elif info.type == "F16":
                values = raw.view(np.float16).astype(np.float32)
            else:
                rows = int(np.prod(info.shape[1:], dtype=np.int64))
                values = dequantize(raw.reshape(rows, -1), kind)
        except (KeyError, NotImplementedError):
            raise ModelError(f"{self.file.path}: tensors of type {info.type} cannot be read yet") from None
        tensor = torch.from_numpy(np.array(values, dtype=np.float32, copy=info.type == "F32").reshape(self.shape(name)))
        match = re.search(r"self_attn\.([qk])_proj", name)
        return _to_halves(tensor, self.heads[match[1]]) if match and self.permuted else tensor


def _gguf_name(name: str) -> str:
    if match := LAYER.fullmatch(name):
        return f"blk.{match[1]}.{GGUF_LAYER_NAMES.get(match[2], match[2])}.{match[3]}"
    return GGUF_NAMES.get(name, name)


def _to_halves(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes GGUF's order of rows within a head: pairs (0, 1), (2, 3) … become halves."""
    size = tensor.shape[0] // heads
    return tensor.view(heads, size // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


class SafetensorsWeights:
    """One file, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        index = folder / INDEX
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

    def __call__(self, name: str) -> torch.Tensor:
        if name not in self.files:
            raise ModelError(f"{self.folder} has no tensor {name!r}: the model is incomplete")
        tensor: torch.Tensor = self.files[name].get_tensor(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(
                f"{self.folder}: {name} is {tensor.dtype}: quantized folders are not supported, GGUF files are"
            )
        return tensor
