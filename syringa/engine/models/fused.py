"""The quantized decoder: all layers of `decoder.Decoder` in one call into the compiled kernels."""

from __future__ import annotations

from ctypes import byref, c_void_p
from typing import cast

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.linear import LinearLayer, NativeLinear
from syringa.engine.cpu.layers.native_ops import NativeOps, native_batch
from syringa.engine.cpu.native import DecoderLayerPointers, DecoderStack, Kernels, StepRows
from syringa.engine.execution.batch import StepTensors
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.decoder import DecoderLayer, Embedding


class FusedDecoder:
    """`Decoder` for quantized layers whose gate and up projections are one gated linear layer."""

    def __init__(
        self,
        config: DecoderConfig,
        ops: NativeOps,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: LinearLayer,
    ) -> None:
        self.config = config
        self.ops = ops
        self.kernels: Kernels = ops.kernels
        self.embedding = embedding
        self.layers = layers  # keeps the weights of the pointers below alive
        self.norm = norm
        self.head = head
        self._layers = (DecoderLayerPointers * config.layers)(
            *(_layer(layer, ops, i) for i, layer in enumerate(layers))
        )
        cosine, sine = (table.data_ptr() for table in ops.rotary)
        self._stack = DecoderStack(self._layers, config.layers, config.hidden, config.eps, cosine, sine)

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        x = self.embedding[step.tokens].float()
        rows = StepRows(x.data_ptr(), step.positions.data_ptr(), step.slot_mapping.data_ptr(), len(x))
        self.kernels.run_layers(
            byref(self._stack),
            byref(rows),
            native_batch(step),
            cache.keys.data_ptr(),
            cache.values.data_ptr(),
            cache.keys.stride(0),
            cache.keys.dtype == torch.bfloat16,
        )
        if len(step.logit_rows) != len(x):
            x = x[step.logit_rows]
        return self.head(self.ops.rms_norm(x, self.norm, self.config.eps))


def _layer(layer: DecoderLayer, ops: NativeOps, index: int) -> DecoderLayerPointers:
    linears = {name: cast(NativeLinear, getattr(layer, name)) for name in ("qkv", "out", "gate_up", "down")}
    q_norm, k_norm = ops.norm_addresses[index]
    return DecoderLayerPointers(
        input_norm=layer.input_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        **{name: c_void_p(linear.address) for name, linear in linears.items()},
        **{f"{name}_bias": c_void_p(linear.bias_address) for name, linear in linears.items()},
        q_norm=q_norm,
        k_norm=k_norm,
        rotary=ops.rotary_shapes[index],
        attention=ops.attention_shapes[index],
    )
