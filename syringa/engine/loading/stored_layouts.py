"""Folders whose tensors are stored otherwise than the native decoder reads them: Gemma's norms, Phi-3's projections."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from syringa.errors import ModelError

if TYPE_CHECKING:
    from syringa.engine.loading.quantized import QuantizedWeight
    from syringa.engine.loading.weights import WeightSource
    from syringa.engine.models.config import DecoderConfig

_PROJECTION = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.)(q|k|v|gate|up)_proj\.weight")


class OffsetNorms:
    """`WeightSource` of a folder whose norms are stored minus one."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.has, self.shape, self.quantized = source.has, source.shape, source.quantized

    def __call__(self, name: str) -> torch.Tensor:
        tensor = self._source(name)
        return tensor.float() + 1.0 if name.endswith("norm.weight") else tensor


class SplitProjections:
    """`WeightSource` of a folder whose q, k and v are one matrix, and gate and up another one: their rows by name."""

    def __init__(self, source: WeightSource, config: DecoderConfig) -> None:
        self._source, self._config = source, config
        self._name = ""  # of the joined matrix that was read last, each for several projections
        self._matrix: torch.Tensor | None = None
        self._stored: QuantizedWeight | None = None

    def has(self, name: str) -> bool:
        part = find_rows(name, self._config)
        return self._source.has(part.name if part is not None else name)

    def shape(self, name: str) -> tuple[int, ...]:
        part = find_rows(name, self._config)
        if part is None:
            return self._source.shape(name)
        stored = self._source.shape(part.name)
        part.check(stored)
        return part.rows, *stored[1:]

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        part = find_rows(name, self._config)
        if part is None:
            return self._source.quantized(name, device)
        if self._name != part.name or self._stored is None or self._stored.data.device != device:
            self._name, self._matrix, self._stored = part.name, None, self._source.quantized(part.name, device)
        if (found := self._stored) is None:
            return None
        rows = slice(part.first, part.first + part.rows)
        zeros = None if found.zeros is None else found.zeros[rows]
        return replace(found, data=found.data[rows], scales=found.scales[rows], zeros=zeros)

    def __call__(self, name: str) -> torch.Tensor:
        part = find_rows(name, self._config)
        if part is None:
            return self._source(name)
        if self._name != part.name or self._matrix is None:
            self._name, self._matrix, self._stored = part.name, self._source(part.name), None
        return self._matrix[part.first : part.first + part.rows]


class StoredRows(NamedTuple):
    """Where the rows of a projection are in a matrix of several."""

    name: str
    first: int
    rows: int
    total: int  # rows of the matrix

    def check(self, shape: tuple[int, ...]) -> None:
        if len(shape) != 2 or shape[0] != self.total:
            raise ModelError(f"{self.name} is {list(shape)}, and its config says {self.total} rows: fetch it again")


def find_rows(name: str, config: DecoderConfig) -> StoredRows | None:
    """Return where the rows of a projection are, in the layout of Phi-3; None for other tensors."""
    match = _PROJECTION.fullmatch(name)
    if match is None:
        return None
    if match[2] in "qkv":
        queries, keys = config.heads * config.head_size, config.kv_heads * config.head_size
        joined, sizes = "qkv", {"q": queries, "k": keys, "v": keys}
    else:
        joined, sizes = "gate_up", {"gate": config.intermediate, "up": config.intermediate}
    before = list(sizes)[: list(sizes).index(match[2])]
    first = sum(sizes[each] for each in before)
    return StoredRows(f"{match[1]}{joined}_proj.weight", first, sizes[match[2]], sum(sizes.values()))
