"""Read weights by their Hugging Face names from safetensors folders and GGUF files.

GGUF tensors are dequantized to fp32 here (`GgufWeights`), by the compiled kernels if they know the type. The dtypes
gguf and int8 take matrices as they are stored: `BlockLinear` keeps their blocks, `Int8Linear` quantizes them again.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from syringa.engine.cpu.layers.linear import BlockTensor
from syringa.engine.cpu.native import BLOCK_TYPES, FLOAT_TYPES, Kernels
from syringa.engine.models.config import GEMMA_TYPES, JOINED_TYPES, LLAMA_TYPES, is_native, read_config
from syringa.engine.models.hybrid_config import HYBRID_TYPES, language_config
from syringa.engine.models.quantization import read_quantization
from syringa.engine.models.tensor_shapes import check_shapes, tensor_shapes
from syringa.errors import ModelError
from syringa.modelfiles import SAFETENSORS_INDEX, ModelFiles, read_json
from syringa.modelfiles.gguf import OTHER_QUANTIZATION, GgufFile, TensorInfo, read_gguf
from syringa.modelfiles.gguf_architectures import find_architecture

if TYPE_CHECKING:
    from syringa.engine.loading.quantized import QuantizedWeight
    from syringa.engine.models.config import DecoderConfig

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
STORED_TYPES = frozenset(BLOCK_TYPES | FLOAT_TYPES)  # GGUF types that the compiled kernels read
MXFP4_SUFFIXES = ("_blocks", "_scales")  # returned as stored: `gpu.expert_loading` dequantizes them
LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")


def scale_names(name: str) -> list[str]:
    """Return the names that the scale of an NVFP4 tensor may have, then those of its activations' scale."""
    names = [name.removesuffix(".weight"), name]
    return [f"{each}.scale" for each in names] + [f"{each}.input_scale" for each in names]


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


def open_weights(files: ModelFiles, config: dict[str, Any], kernels: Kernels | None = None) -> WeightSource:
    if files.kind == "gguf":
        if config.get("model_type") in LLAMA_TYPES:
            return GgufWeights(files, config, kernels)
        from syringa.engine.loading.gguf_hybrid import GgufHybrid
        from syringa.engine.loading.gguf_parameters import GgufParameters  # slow to import

        if config.get("model_type") in HYBRID_TYPES:
            return GgufHybrid(files, config, kernels)
        return GgufParameters(files, config, kernels, native=is_native(config))
    folder = SafetensorsWeights(Path(files.path))
    quantization = read_quantization(config)
    weights: WeightSource = folder
    if quantization is not None:
        from syringa.engine.loading.quantized import QuantizedWeights

        weights = QuantizedWeights(folder, quantization)
    kind = config.get("model_type")
    if kind in (*JOINED_TYPES, *GEMMA_TYPES):
        from syringa.engine.loading.stored_layouts import OffsetNorms, SplitProjections

        return SplitProjections(weights, read_config(config)) if kind in JOINED_TYPES else OffsetNorms(weights)
    if kind == "gpt_oss":
        from syringa.engine.loading.packed_experts import PackedExperts

        return PackedExperts(weights)
    if language_config(config).get("model_type") in HYBRID_TYPES:
        from syringa.engine.loading.hybrid_weights import HybridWeights

        return HybridWeights(weights, read_config(config))
    return weights


def check_tensors(config: DecoderConfig, weights: WeightSource, path: str) -> None:
    """Raise `ModelError` if the tensors are not those of a decoder, or do not have their shapes."""
    check_shapes(config, weights, path)
    if isinstance(weights, GgufWeights):
        weights.check_all_used(tensor_shapes(config))


class GgufWeights:
    """Tensors of a GGUF file, dequantized to fp32 when they are read, or as they are stored.

    Without `kernels`, tensors are dequantized by the `gguf` package, on one core.
    """

    def __init__(self, files: ModelFiles, config: dict[str, Any], kernels: Kernels | None = None) -> None:
        self.file: GgufFile = read_gguf(files.path)
        self.kernels = kernels
        self.data = {part: _map_file(part) for part in {info.file for info in self.file.tensors.values()}}
        self.architecture = find_architecture(self.file.metadata)
        self.heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}

    def has(self, name: str) -> bool:
        return self.gguf_name(name) in self.file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self.info(name).shape))

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        return None

    def __call__(self, name: str) -> torch.Tensor:
        tensor, order = self.read(self.info(name)), self.row_order(name)
        return tensor if order is None else tensor[order]

    def blocks(self, name: str) -> BlockTensor | None:
        """Return a matrix as it is quantized in the file; None if the compiled kernels cannot multiply its type."""
        return self.read_blocks(self.info(name), self.row_order(name)) if self.has(name) else None

    def stored(self, name: str) -> BlockTensor | None:
        """Return a matrix as it is in the file; None if the compiled kernels cannot read its type."""
        return self.read_blocks(self.info(name), self.row_order(name), STORED_TYPES)

    def info(self, name: str) -> TensorInfo:
        """Return where a tensor is in the file. Raise `ModelError` if it is missing."""
        return self.find(self.gguf_name(name))

    def check_all_used(self, names: Iterable[str]) -> None:
        """Raise `ModelError` if the file has tensors that none of these is made of, where that is known."""

    def gguf_name(self, name: str) -> str:
        """Return the name of a tensor in the file."""
        if match := LAYER_TENSOR.fullmatch(name):
            return f"blk.{match[1]}.{GGUF_LAYER_TENSORS.get(match[2], match[2])}.{match[3]}"
        return GGUF_TENSORS.get(name, name)

    def find(self, gguf_name: str) -> TensorInfo:
        """Raise `ModelError` if the file does not have the tensor."""
        info = self.file.tensors.get(gguf_name)
        if info is None:
            raise ModelError(f"{self.file.path} has no tensor {gguf_name!r}: the model is incomplete, fetch it again")
        return info

    def read(self, info: TensorInfo) -> torch.Tensor:
        """Return a tensor as it is in the file, in fp32. Raise `ModelError` if a number is not finite."""
        if self.kernels is not None and info.type in STORED_TYPES:
            inputs, *others = info.shape
            tensor = BlockTensor(self._label(info), info.type, math.prod(others), inputs, self._bytes(info))
            return tensor.dequantize(self.kernels).view(tuple(reversed(info.shape)))
        return torch.from_numpy(self._dequantize(info).reshape(tuple(reversed(info.shape))))

    def read_blocks(
        self, info: TensorInfo, order: torch.Tensor | None = None, types: Container[str] = frozenset(BLOCK_TYPES)
    ) -> BlockTensor | None:
        """Return a matrix as it is in the file; None if its type is not one of `types`.

        `order`: of its rows, or of some of them.
        """
        if info.type not in types or len(info.shape) != 2:
            return None
        inputs, rows = info.shape
        if order is None:
            return BlockTensor(self._label(info), info.type, rows, inputs, self._bytes(info))
        numbers = order.to(torch.int32).numpy()
        return BlockTensor(self._label(info), info.type, len(order), inputs, self._bytes(info), numbers)

    def row_order(self, name: str) -> torch.Tensor | None:
        """Return the rows that a tensor has in the file, by its own rows; None if they are the same."""
        heads = self._interleaved_heads(name)
        return _deinterleave_rope(torch.arange(self.info(name).shape[-1]), heads) if heads else None

    def _label(self, info: TensorInfo) -> str:
        return f"{info.file}: {info.name}"

    def _interleaved_heads(self, name: str) -> int:
        """Return the number of heads if a tensor's rows are in pairs for the rotary embedding, else 0."""
        if self.architecture is None or not self.architecture.interleaved_rope:
            return 0
        match = re.search(r"self_attn\.([qk])_proj", name)
        return int(self.heads[match[1]]) if match else 0

    def _bytes(self, info: TensorInfo) -> np.ndarray:
        mapped = self.data[info.file]
        if mapped.size() < len(mapped):  # reading it would end the process
            raise ModelError(f"{info.file} was truncated while it was read; fetch it again")
        return np.frombuffer(mapped, np.uint8, info.size, info.offset)

    def _dequantize(self, info: TensorInfo) -> np.ndarray:
        raw = self._bytes(info)
        try:
            if info.type == "F32":
                values = raw.view(np.float32)
            elif info.type == "F16":
                values = raw.view(np.float16).astype(np.float32)
            else:
                from gguf import GGMLQuantizationType  # slow to import
                from gguf.quants import dequantize

                rows = int(np.prod(info.shape[1:], dtype=np.int64))
                with np.errstate(invalid="ignore", over="ignore"):  # corrupt scales are reported below
                    values = dequantize(raw.reshape(rows, -1), GGMLQuantizationType[info.type])
        except (KeyError, NotImplementedError):
            raise ModelError(
                f"{self._label(info)} is of the type {info.type}, which cannot be read: {OTHER_QUANTIZATION}"
            ) from None
        if info.type == "NVFP4":
            values = self._scaled(info, values)
        if values.size and not (np.isfinite(values.max()) and np.isfinite(values.min())):
            raise ModelError(f"{self._label(info)} is corrupt: a weight is not a finite number; fetch the file again")
        return np.array(values, dtype=np.float32, copy=info.type == "F32")

    def _scaled(self, info: TensorInfo, values: np.ndarray) -> np.ndarray:
        """Return the values of an NVFP4 tensor, or of one of its experts, times their second scale if there is one."""
        found = (self.file.tensors.get(name) for name in scale_names(info.name)[:2])
        if (stored := next((each for each in found if each is not None), None)) is None:
            return values
        scales, whole = self.file.floats(stored.name), self.file.tensors[info.name]
        experts = whole.shape[2] if len(whole.shape) > 2 else 1
        if len(scales) not in (1, experts):
            raise ModelError(f"{self._label(info)} has {len(scales)} scales: fetch the file again")
        part = whole.size // len(scales)
        first, count = (info.offset - whole.offset) // part, max(1, info.size // part)
        values *= np.repeat(np.array(scales[first : first + count], np.float32), len(values) // count)[:, None]
        return values


def _map_file(path: str) -> mmap.mmap:
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: it is empty
        raise ModelError(f"{path} cannot be read: {error}") from None


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
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise ModelError(f"{index} does not name the files of its tensors: fetch it again")
            names = sorted(set(files.values()))
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        self.folder = folder
        self._error = SafetensorError
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
            raise ModelError(f"{self.folder} has no tensor {name!r}: the model is incomplete, fetch it again")
        try:
            tensor: torch.Tensor = self.files[name].get_tensor(name)
        except (self._error, AttributeError, RuntimeError) as error:  # a dtype that torch does not have
            raise ModelError(f"{self.folder}: {name} cannot be read: {error}") from None
        return tensor

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self.read(name)
        if name.endswith(MXFP4_SUFFIXES):
            if tensor.dtype == torch.uint8:
                return tensor
            raise ModelError(
                f"{self.folder}: {name} is {tensor.dtype}, and MXFP4 is torch.uint8: fetch the model again"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ModelError(
                f"{self.folder}: {name} is {tensor.dtype}, and config.json does not say how it is quantized: "
                "use the original folder, or a GGUF file"
            )
        return tensor
