"""Read the tensors of Qwen3.5 from GGUF files."""

from __future__ import annotations

import re
from typing import Any

import torch

from syringa.engine.cpu.native import Kernels
from syringa.engine.loading.gguf_parameters import GgufParameters
from syringa.engine.models.config import read_config
from syringa.errors import ModelError
from syringa.modelfiles import ModelFiles

# Tensors of a gated delta net, after `model.layers.N.linear_attn.`.
_DELTA_NET_TENSORS = {
    "qkv_proj.weight": "attn_qkv.weight",
    "z_proj.weight": "attn_gate.weight",
    "b_proj.weight": "ssm_beta.weight",
    "a_proj.weight": "ssm_alpha.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}
_DELTA_NET = re.compile(r"model\.layers\.(\d+)\.linear_attn\.(" + "|".join(map(re.escape, _DELTA_NET_TENSORS)) + ")")
_GATED_QUERY = re.compile(r"model\.layers\.\d+\.self_attn\.(q|g)_proj\.weight")


class GgufHybrid(GgufParameters):
    """Tensors of a GGUF file of Qwen3.5 by the names of `hybrid_weights`.

    llama.cpp's converter stores value heads tiled: the first one of each key head, then the second ones. Here those of
    a key head are side by side, but in the inputs of `out_proj` (`delta_rule.tiled_order`).
    """

    def __init__(self, files: ModelFiles, config: dict[str, Any], kernels: Kernels | None = None) -> None:
        super().__init__(files, config, kernels, native=True)
        decoder = read_config(config)
        assert decoder.delta_net is not None
        self.decoder, self.net = decoder, decoder.delta_net

    def gguf_name(self, name: str) -> str:
        match = _DELTA_NET.fullmatch(name)
        if match is None:
            return super().gguf_name(name.replace("self_attn.g_proj", "self_attn.q_proj"))
        return f"blk.{match[1]}.{_DELTA_NET_TENSORS[match[2]]}"

    def shape(self, name: str) -> tuple[int, ...]:
        order, shape = self.row_order(name), super().shape(name)
        if order is not None:
            shape = (len(order), *shape[1:])
        if name.endswith("shared_expert_gate.weight"):
            return (1, *shape)  # the converter drops dimensions of size 1
        return (shape[0], 1, *shape[1:]) if name.endswith("conv1d.weight") else shape

    def __call__(self, name: str) -> torch.Tensor:
        tensor = super().__call__(name)
        if name.endswith("A_log"):  # -e^A is stored
            if not (tensor < 0).all():
                raise ModelError(f"{self.file.path}: {self.gguf_name(name)} is corrupt: a rate is not negative")
            return torch.log(-tensor)
        if name.endswith("shared_expert_gate.weight"):
            return tensor[None]
        return tensor[:, None] if name.endswith("conv1d.weight") else tensor

    def row_order(self, name: str) -> torch.Tensor | None:
        net, gated, match = self.net, _GATED_QUERY.fullmatch(name), _DELTA_NET.fullmatch(name)
        kind = match[2] if match is not None else ""
        if gated is not None:
            expected = 2 * self.decoder.heads * self.decoder.head_size
        elif not kind or kind in ("norm.weight", "out_proj.weight"):
            return None
        elif kind in ("qkv_proj.weight", "conv1d.weight"):
            expected = net.channels
        else:
            expected = net.value_width if kind == "z_proj.weight" else net.value_heads
        if (stored := self.info(name).shape[-1]) != expected:
            raise ModelError(
                f"{self.file.path}: {self.gguf_name(name)} has {stored} rows, and its config says {expected}"
            )
        if gated is not None:  # queries and gates by turns, head by head
            pairs = torch.arange(expected).view(self.decoder.heads, 2, -1)
            return pairs[:, 0 if gated[1] == "q" else 1].flatten()
        if expected == net.channels:
            first = torch.arange(2 * net.key_width)
            return torch.cat([first, 2 * net.key_width + self._value_order(net.value_size)])
        return self._value_order(expected // net.value_heads)

    def _value_order(self, size: int) -> torch.Tensor:
        """Return the stored rows of value heads with `size` rows each."""
        rows = torch.arange(self.net.value_heads * size)
        return rows.view(-1, self.net.key_heads, size).transpose(0, 1).flatten()
