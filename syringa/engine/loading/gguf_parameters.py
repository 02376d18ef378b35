"""Read tensors from GGUF files by the names of Hugging Face folders, undoing what llama.cpp's converter did to them.

The names of tensors come from the `gguf` package, the rest from `modelfiles.gguf_architectures`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import gguf
import msgspec
import torch

from syringa.engine.cpu.layers.linear import BlockTensor
from syringa.engine.cpu.native import Kernels
from syringa.engine.loading.stored_layouts import find_rows
from syringa.engine.loading.weights import GgufWeights, scale_names
from syringa.engine.models.config import JOINED_TYPES, read_config
from syringa.errors import ModelError
from syringa.modelfiles import ModelFiles
from syringa.modelfiles.gguf import TensorInfo

# All experts of a layer, and one expert as checkpoints of Qwen3-MoE and Mixtral name it.
EXPERTS = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(gate_up_proj|down_proj)(_bias)?")
EXPERT = re.compile(r"model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight")
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
_LAYER = re.compile(r"blk\.(\d+)\.")
# Read with the config.
ROPE_TENSORS = {"rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight"}


class GgufParameters(GgufWeights):
    """Tensors of a GGUF file by the parameter names of `transformers`' definition of its architecture.

    For the `native` decoder, projections that share a matrix have names of their own.
    """

    def __init__(
        self, files: ModelFiles, config: dict[str, Any], kernels: Kernels | None = None, *, native: bool = False
    ) -> None:
        super().__init__(files, config, kernels)
        self.joined = read_config(config) if native and config.get("model_type") in JOINED_TYPES else None
        self.layers = config["num_hidden_layers"]
        self.experts = config.get("num_local_experts") or config.get("num_experts")
        name = self.file.metadata["general.architecture"]
        by_name = {text: architecture for architecture, text in gguf.MODEL_ARCH_NAMES.items()}
        if self.architecture is None or name not in by_name:
            raise ModelError(f"{files.path}: the installed `gguf` package does not know {name!r}: install a newer one")
        self.entry = self.architecture
        self.names = gguf.get_tensor_name_map(by_name[name], config["num_hidden_layers"])

    def gguf_name(self, name: str) -> str:
        module, _, kind = name.rpartition(".")
        if kind not in ("weight", "bias"):
            module, kind = name, "weight"  # a parameter of no layer, such as the sinks of gpt-oss
        found = self.names.get_name(module)
        return f"{found}.{kind}" if found else name

    def has(self, name: str) -> bool:
        return all(each in self.file.tensors for each in self.sources(name))

    def info(self, name: str) -> TensorInfo:
        if match := EXPERT.fullmatch(name):
            return self._expert(self.find(self.sources(name)[0]), int(match[2]))
        part = find_rows(name, self.joined) if self.joined is not None else None
        if part is None:
            return super().info(name)
        info = super().info(part.name)
        part.check(tuple(reversed(info.shape)))
        inputs, rows = info.shape
        row_bytes = info.size // rows
        return msgspec.structs.replace(
            info, shape=(inputs, part.rows), offset=info.offset + part.first * row_bytes, size=part.rows * row_bytes
        )

    def sources(self, name: str) -> list[str]:
        """Return the tensors of the file that a parameter is made of."""
        if match := EXPERTS.fullmatch(name):
            kind = "bias" if match[3] else "weight"
            parts = ("gate", "up") if match[2] == "gate_up_proj" else ("down",)
            return [f"blk.{match[1]}.ffn_{part}_exps.{kind}" for part in parts]
        if (match := EXPERT.fullmatch(name)) and match[3] in PROJECTIONS:
            return [f"blk.{match[1]}.ffn_{PROJECTIONS[match[3]]}_exps.weight"]
        part = find_rows(name, self.joined) if self.joined is not None else None
        return [self.gguf_name(name if part is None else part.name)]

    def shape(self, name: str) -> tuple[int, ...]:
        if not EXPERTS.fullmatch(name):
            return super().shape(name)
        infos = [self.find(source) for source in self.sources(name)]
        if any(info.shape != infos[0].shape for info in infos):
            raise ModelError(f"{self.file.path}: {infos[0].name} and {infos[1].name} have different shapes")
        experts, *sizes = reversed(infos[0].shape)
        if "gate_up_proj" in name:
            sizes[0] *= 2
        return experts, *(reversed(sizes) if self.entry.experts == "interleaved" else sizes)

    def __call__(self, name: str) -> torch.Tensor:
        if EXPERTS.fullmatch(name):
            return self._read_experts(name)
        return super().__call__(name)

    def expert_blocks(self, module: str) -> dict[str, list[BlockTensor]] | None:
        """Return the gates, ups and downs of each expert of a layer as they are quantized in the file.

        None if the compiled kernels cannot multiply the type of one of them.
        """
        found: dict[str, list[BlockTensor]] = {}
        (down,), (gate, up) = self.sources(f"{module}.down_proj"), self.sources(f"{module}.gate_up_proj")
        for part, name in (("gate", gate), ("up", up), ("down", down)):
            info = self.file.tensors.get(name)
            if info is None or len(info.shape) != 3:
                return None
            blocks = [self.read_blocks(self._expert(info, expert)) for expert in range(info.shape[-1])]
            found[part] = [each for each in blocks if each is not None]
            if len(found[part]) < len(blocks):
                return None
        return found

    def check_all_used(self, names: Iterable[str]) -> None:
        """Raise `ModelError` if the file has tensors that none of the parameters is made of."""
        used = {source for name in names for source in self.sources(name)}
        used |= {scale for name in used for scale in scale_names(name)}
        unused = [name for name in sorted(self.file.tensors.keys() - used - ROPE_TENSORS) if not self._left_out(name)]
        if unused:
            raise ModelError(
                f"{self.file.path}: {self.entry.model_class} has no parameter for {unused[0]!r}: "
                "use the model's Hugging Face folder"
            )

    def _left_out(self, gguf_name: str) -> bool:
        """Return whether a tensor is of a layer that predicts more than one token."""
        match = _LAYER.match(gguf_name)
        return match is not None and int(match[1]) >= self.layers

    def _read_experts(self, name: str) -> torch.Tensor:
        parts = [self.read(self.find(source)) for source in self.sources(name)]
        if self.entry.experts != "interleaved":
            return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        joined = parts[0] if len(parts) == 1 else torch.stack(parts, dim=2).flatten(1, 2)
        return joined.transpose(1, 2).contiguous() if joined.dim() == 3 else joined

    def _expert(self, info: TensorInfo, expert: int) -> TensorInfo:
        """Return one expert's part of a tensor."""
        *shape, count = info.shape
        if count != self.experts:
            raise ModelError(f"{self.file.path}: {info.name} has {count} experts, and by its metadata {self.experts}")
        size = info.size // count
        return msgspec.structs.replace(info, shape=tuple(shape), offset=info.offset + expert * size, size=size)
