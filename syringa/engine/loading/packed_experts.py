"""The experts of gpt-oss one by one: its folders have one tensor for all experts of a layer, in bf16 or MXFP4.

Gates and ups are interleaved, in bf16 as inputs × outputs, in MXFP4 as outputs × inputs.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from syringa.engine.loading.quantized import check_mxfp4_scales, mxfp4_weight
from syringa.engine.loading.weights import MXFP4_SUFFIXES, WeightSource

if TYPE_CHECKING:
    from syringa.engine.loading.quantized import QuantizedWeight

_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_BLOCKS, _SCALES = MXFP4_SUFFIXES


class PackedExperts:
    """`WeightSource` of such a folder, which also has the matrices of each expert by the names of Qwen3-MoE."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self._layer = ""  # that was read last
        self._tensors: dict[str, torch.Tensor] = {}  # of its experts
        self._last, self._weight = ("", -1), torch.empty(0)  # an expert's matrix: gates and ups are read one by one
        self.has, self.shape = source.has, source.shape

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        return self._source.quantized(name, device)

    def __call__(self, name: str) -> torch.Tensor:
        match = _EXPERT.fullmatch(name)
        if match is None:
            return self._source(name)
        prefix, expert, kind = match[1], int(match[2]), match[3]
        stored = f"{prefix}{'down' if kind == 'down' else 'gate_up'}_proj"
        if (stored, expert) != self._last:
            self._last, self._weight = (stored, expert), self._read_expert(stored, expert)
        weight = self._weight
        return weight if kind == "down" else weight[0 if kind == "gate" else 1 :: 2]

    def _read_expert(self, name: str, expert: int) -> torch.Tensor:
        """Return the matrix of an expert, outputs × inputs."""
        if self._source.has(f"{name}{_BLOCKS}"):
            blocks, scales = self._read_packed(f"{name}{_BLOCKS}"), self._read_packed(f"{name}{_SCALES}")
            return mxfp4_weight(blocks[expert], scales[expert]).dequantize()
        return self._read_packed(name)[expert].T

    def _read_packed(self, name: str) -> torch.Tensor:
        layer = name.rpartition(".")[0]
        if layer != self._layer:
            self._layer, self._tensors = layer, {}
        if name not in self._tensors:
            self._tensors[name] = self._source(name)
            if name.endswith(_SCALES):
                check_mxfp4_scales(self._tensors[name], name)
        return self._tensors[name]
