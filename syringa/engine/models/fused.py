"""The quantized decoder: all layers of `decoder.Decoder` in one call into the compiled kernels (native/decoder.h)."""

from __future__ import annotations

from ctypes import POINTER, byref, pointer, sizeof
from ctypes import cast as cast_pointer
from typing import TypeGuard

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.experts import NativeExperts
from syringa.engine.cpu.layers.linear import LinearLayer, NativeLinear
from syringa.engine.cpu.layers.native_ops import NativeOps, address, native_batch
from syringa.engine.cpu.native import DecoderLayerPointers, DecoderStack, StepRows
from syringa.engine.execution.batch import StepTensors
from syringa.engine.execution.interruption import StepInterrupted
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.decoder import Decoder, Embedding
from syringa.engine.models.layers import Attention, DecoderLayer, Mlp

_PARTS = 10  # at least, into which the layers of a step are divided that may be given up


class FusedDecoder(Decoder):
    """`Decoder` for layers that `can_fuse`."""

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
        super().__init__(config, ops, embedding, layers, norm, head)
        self.kernels = ops.kernels
        # The layers keep the weights of these pointers alive.
        self._layers = (DecoderLayerPointers * config.layers)(
            *(_layer(layer, ops, i) for i, layer in enumerate(layers))
        )
        self._stack = DecoderStack(self._layers, config.layers, config.hidden, config.eps)
        # The same layers in parts, between which a step may be given up.
        size = max(1, config.layers // _PARTS)
        self._parts: list[tuple[int, DecoderStack]] = []  # with the number of the first layer
        for first in range(0, config.layers, size):
            begin = byref(self._layers, first * sizeof(DecoderLayerPointers))
            count = min(size, config.layers - first)
            part = DecoderStack(cast_pointer(begin, POINTER(DecoderLayerPointers)), count, config.hidden, config.eps)
            self._parts.append((first, part))

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        x = self.embed(step.tokens)
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
        return self.logits(x[: len(step.logit_rows)])

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


def can_fuse(layers: list[DecoderLayer]) -> bool:
    """Return whether all layers are attention and quantized, with gates that are computed with the products."""
    return all(
        isinstance(layer.mixer, Attention)
        and not layer.mixer.gates
        and isinstance(layer.mixer.project, NativeLinear)
        and (isinstance(layer.mlp, NativeExperts) or _is_native(layer.mlp))
        for layer in layers
    )


def _is_native(mlp: object) -> TypeGuard[Mlp]:
    return isinstance(mlp, Mlp) and isinstance(mlp.gate_up.linear, NativeLinear) and mlp.gate_up.linear.gated


def _layer(layer: DecoderLayer, ops: NativeOps, index: int) -> DecoderLayerPointers:
    attention, mlp = layer.mixer, layer.mlp
    assert isinstance(attention, Attention)
    linears = {"qkv": attention.project, "out": attention.out.linear}
    mlp_norm, experts = None, None
    if isinstance(mlp, NativeExperts):
        experts = pointer(mlp.pointers)
    else:
        assert isinstance(mlp, Mlp)
        linears |= {"gate_up": mlp.gate_up.linear, "down": mlp.down.linear}
        mlp_norm = mlp.down.norm
    found = DecoderLayerPointers(
        input_norm=layer.input_norm.data_ptr(),
        post_norm=layer.post_norm.data_ptr(),
        attention_norm=address(attention.out.norm),
        mlp_norm=address(mlp_norm),
        experts=experts,
        rotary=ops.rotary_shapes[index],
        attention=ops.attention_shapes[index],
    )
    found.q_norm, found.k_norm = ops.norm_addresses[index]
    found.cosine, found.sine = ops.rotary_addresses[index]
    for name, linear in linears.items():
        assert isinstance(linear, NativeLinear)
        setattr(found, name, linear.address)
        setattr(found, f"{name}_bias", linear.bias_address)
    return found
