"""The quantized decoder: all layers of `decoder.Decoder` in one call into the compiled kernels."""

from __future__ import annotations

from ctypes import POINTER, byref, c_void_p, sizeof
from ctypes import cast as cast_pointer
from typing import cast

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.linear import LinearLayer, NativeLinear
from syringa.engine.cpu.layers.native_ops import NativeOps, native_batch
from syringa.engine.cpu.native import DecoderLayerPointers, DecoderStack, Kernels, StepRows
from syringa.engine.execution.batch import StepTensors
from syringa.engine.execution.interruption import StepInterrupted
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.decoder import DecoderLayer, Embedding

_PARTS = 10  # at least, into which the layers of a step are divided that may be given up


class FusedDecoder:
    """`Decoder` for quantized layers whose gate and up projections are one gated linear layer."""

    interruptible = True

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
        # The same layers in parts, between which a step may be given up.
        size = max(1, config.layers // _PARTS)
        self._parts: list[tuple[int, DecoderStack]] = []  # with the number of the first layer
        for first in range(0, config.layers, size):
            address = byref(self._layers, first * sizeof(DecoderLayerPointers))
            pointer = cast_pointer(address, POINTER(DecoderLayerPointers))
            count = min(size, config.layers - first)
            part = DecoderStack(pointer, count, config.hidden, config.eps, cosine, sine)
            self._parts.append((first, part))

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        x = self.embedding[step.tokens].float()
        addresses = (each.data_ptr() for each in (x, step.positions, step.slot_mapping))
        rows = StepRows(*addresses, len(x), step.logit_rows.data_ptr(), num_kept=len(x))
        parts = [(0, self._stack)] if step.is_interrupted is None else self._parts
        for first, part in parts:
            if step.is_interrupted is not None and step.is_interrupted():
                raise StepInterrupted
            if part is parts[-1][1]:
                rows.num_kept = len(step.logit_rows)
            self._run(part, first, rows, step, cache)
        if step.is_interrupted is not None and step.is_interrupted():
            raise StepInterrupted
        x = x[: len(step.logit_rows)]
        return self.head(self.ops.rms_norm(x, self.norm, self.config.eps))

    def _run(self, stack: DecoderStack, first: int, rows: StepRows, step: StepTensors, cache: CacheTensors) -> None:
        """Run some layers. `first`: the number of the first one."""
        keys, values = cache.keys, cache.values
        self.kernels.run_layers(
            byref(stack),
            byref(rows),
            native_batch(step),
            keys.data_ptr() + first * keys.stride(0) * keys.element_size(),
            values.data_ptr() + first * values.stride(0) * values.element_size(),
            keys.stride(0),
            keys.dtype == torch.bfloat16,
        )


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
