"""The tensors of hybrid models (Qwen3-Next, Qwen3.5) under common names, whatever their folder's layout is.

A layer of linear attention has `linear_attn.qkv_proj`, `z_proj`, `b_proj` and `a_proj`. Qwen3-Next stores these in two
matrices with the rows of a key head side by side, Qwen3.5 in four. A layer of attention has `self_attn.g_proj` beside
`q_proj`: queries and gates are stored head by head in one matrix. Experts may be one tensor per layer. Weights of norms
are stored minus one.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from syringa.engine.loading.weights import WeightSource
from syringa.engine.models.config import DecoderConfig
from syringa.errors import ModelError

if TYPE_CHECKING:
    from syringa.engine.loading.quantized import QuantizedWeight

_NESTED = "model.language_model."  # prefix of the language model in a folder with a vision tower
_DELTA_NET = re.compile(r"(.*\.linear_attn\.)(qkv|z|b|a)_proj\.(weight|bias)")
_GATED = re.compile(r"(.*\.self_attn\.)(q|g)_proj\.(weight|bias)")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_OFFSET_NORM = re.compile(r"model\.norm\.weight|.*\.(input_layernorm|post_attention_layernorm|[qk]_norm)\.weight")


class StoredPart(NamedTuple):
    """Where a tensor is: the whole of a stored one, an expert's part of it, or some of its rows."""

    name: str
    rows: torch.Tensor | None = None  # int64; None: all
    expert: int | None = None


class HybridWeights:
    """`WeightSource` of a hybrid model, over that of its folder."""

    def __init__(self, source: WeightSource, config: DecoderConfig) -> None:
        assert config.delta_net is not None
        self._source = source
        self._config, self._shape = config, config.delta_net
        self._prefix = _NESTED if source.has(f"{_NESTED}embed_tokens.weight") else "model."
        self._packed: dict[str, torch.Tensor] = {}  # the experts of the layer that is being read

    def has(self, name: str) -> bool:
        return self._source.has(self._find(name).name)

    def shape(self, name: str) -> tuple[int, ...]:
        part = self._find(name)
        stored = self._source.shape(part.name)
        if part.expert is not None:
            stored = stored[1:]
        if part.rows is None:
            return stored
        if stored[:1] != ((rows := self._stored_rows(name)),):
            raise ModelError(f"{part.name} is {list(stored)}, and its config says {rows} rows: fetch the model again")
        return (len(part.rows), *stored[1:])

    def quantized(self, name: str, device: torch.device) -> QuantizedWeight | None:
        part = self._find(name)
        if part.expert is not None or (found := self._source.quantized(part.name, device)) is None:
            return None
        if part.rows is None:
            return found
        rows = part.rows.to(found.data.device)
        zeros = None if found.zeros is None else found.zeros[rows]
        return replace(found, data=_take_rows(found.data, rows), scales=found.scales[rows], zeros=zeros)

    def __call__(self, name: str) -> torch.Tensor:
        part = self._find(name)
        if part.expert is not None:
            tensor = self._read_packed(part.name)[part.expert]
        else:
            tensor = self._source(part.name)
        if part.rows is not None:
            tensor = tensor[part.rows]
        return tensor.float() + 1.0 if _OFFSET_NORM.fullmatch(name) else tensor

    def _read_packed(self, name: str) -> torch.Tensor:
        if name not in self._packed:
            if len(self._packed) == 2:  # of the layer before
                self._packed.clear()
            self._packed[name] = self._source(name)
        return self._packed[name]

    def _stored_name(self, name: str) -> str:
        return self._prefix + name.removeprefix("model.") if name.startswith("model.") else name

    def _stored_rows(self, name: str) -> int:
        """Return how many rows the stored matrix has that a tensor with selected rows is a part of."""
        if match := _DELTA_NET.fullmatch(name):
            joined = self._shape.channels + self._shape.value_width
            return joined if match[2] in ("qkv", "z") else 2 * self._shape.value_heads
        if _GATED.fullmatch(name):
            return 2 * self._config.heads * self._config.head_size
        return 2 * self._config.expert_intermediate

    def _find(self, name: str) -> StoredPart:
        stored = self._stored_name(name)
        if match := _DELTA_NET.fullmatch(stored):
            prefix, kind, last = match.groups()
            if self._source.has(f"{prefix}in_proj_qkv.weight"):
                return StoredPart(f"{prefix}in_proj_{kind}.{last}")
            joined = "qkvz" if kind in ("qkv", "z") else "ba"
            return StoredPart(f"{prefix}in_proj_{joined}.{last}", self._delta_net_rows(kind))
        if match := _GATED.fullmatch(stored):
            heads, size = self._config.heads, self._config.head_size
            rows = torch.arange(2 * heads * size).view(heads, 2, size)
            return StoredPart(f"{match[1]}q_proj.{match[3]}", rows[:, 0 if match[2] == "q" else 1].flatten())
        if (match := _EXPERT.fullmatch(stored)) and not self._source.has(stored):
            prefix, expert, kind = match.groups()
            if self._source.has(f"{prefix}gate_up_proj"):
                if kind == "down":
                    return StoredPart(f"{prefix}down_proj", expert=int(expert))
                size = self._config.expert_intermediate
                rows = torch.arange(size) + (0 if kind == "gate" else size)
                return StoredPart(f"{prefix}gate_up_proj", rows, int(expert))
        return StoredPart(stored)

    def _delta_net_rows(self, kind: str) -> torch.Tensor:
        shape = self._shape
        key, values = shape.key_size, shape.value_width // shape.key_heads
        if kind in ("b", "a"):
            rows = torch.arange(2 * shape.value_heads).view(shape.key_heads, 2, -1)
            return rows[:, 0 if kind == "b" else 1].flatten()
        rows = torch.arange(shape.channels + shape.value_width).view(shape.key_heads, -1)
        q, k, v, z = rows.split([key, key, values, values], dim=1)
        return z.flatten() if kind == "z" else torch.cat([part.flatten() for part in (q, k, v)])


def _take_rows(data: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Index rows of a matrix of any dtype; torch cannot index all of those with one byte."""
    return data.view(torch.uint8)[rows].view(data.dtype)
