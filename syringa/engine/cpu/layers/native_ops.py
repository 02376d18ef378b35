"""Operations between the linear layers, and sampling, on the compiled kernels."""

from __future__ import annotations

import ctypes
from ctypes import addressof, byref

import torch

from syringa.engine.cpu.layers.cache import LayerCache
from syringa.engine.cpu.layers.linear import Gate
from syringa.engine.cpu.layers.ops import AttentionTensors
from syringa.engine.cpu.native import GATES, AttentionBatch, AttentionShape, Kernels, RotaryShape
from syringa.engine.execution.batch import StepTensors
from syringa.engine.loading.precision import HEAD_SIZE_MULTIPLE
from syringa.engine.models.config import DecoderConfig


def supports_head_size(head_size: int) -> bool:
    """Return whether the attention kernels support a head size."""
    return head_size % HEAD_SIZE_MULTIPLE == 0


class NativeOps:
    """`CpuOps` on the compiled kernels."""

    def __init__(self, kernels: Kernels, config: DecoderConfig, tensors: AttentionTensors) -> None:
        self.kernels = kernels
        self.config = config
        self.tensors = tensors  # keeps the memory of the pointers below alive
        c = config
        self.attention_shapes = [
            AttentionShape(c.heads, c.kv_heads, c.head_size, window, c.score_scale, c.softcap, address(sinks))
            for window, sinks in zip(c.windows, tensors.sinks, strict=True)
        ]
        self.rotary_shapes = [
            RotaryShape(c.heads, c.kv_heads, c.head_size, c.rotary if rotated else 0, c.eps) for rotated in c.rotated
        ]
        self.norm_addresses = [(n[0].data_ptr(), n[1].data_ptr()) if n else (None, None) for n in tensors.norms]
        self.rotary_addresses = [(cosine.data_ptr(), sine.data_ptr()) for cosine, sine in tensors.rotary]

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y = torch.empty_like(x)
        self.kernels.rms_norm(x.data_ptr(), weight.data_ptr(), x.shape[0], x.shape[1], eps, y.data_ptr())
        return y

    def gate(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        rows, width = gate_up.shape
        y = torch.empty(rows, width // 2)
        self.kernels.gate(gate_up.data_ptr(), rows, width // 2, GATES[gate.kind], gate.alpha, gate.limit, y.data_ptr())
        return y

    def sigmoid_mul(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        (rows, width), single = x.shape, gates.shape[1] == 1
        self.kernels.sigmoid_mul(x.data_ptr(), rows, width, gates.data_ptr(), gates.stride(0), single)
        return x

    def attention(self, layer: int, qkv: torch.Tensor, step: StepTensors, cache: LayerCache) -> torch.Tensor:
        rows, stride = qkv.shape
        half = cache.keys.dtype == torch.bfloat16
        keys, values = cache.keys.data_ptr(), cache.values.data_ptr()
        self.kernels.rotary_and_cache(
            byref(self.rotary_shapes[layer]),
            qkv.data_ptr(),
            stride,
            rows,
            step.positions.data_ptr(),
            step.slot_mapping.data_ptr(),
            *self.rotary_addresses[layer],
            *self.norm_addresses[layer],
            keys,
            values,
            half,
        )
        width = self.config.heads * self.config.head_size
        out = torch.empty(rows, width)
        attend(self.kernels, self.attention_shapes[layer], step, keys, values, qkv, stride, out, half)
        return out


def address(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None


class NativeSampler:
    """Sampling by temperature alone, with the signature of `sampling.draw.draw_plain`."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def __call__(self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        rows, size = logits.shape
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        temperatures, uniforms = temperatures.contiguous(), uniforms.contiguous()
        tokens = torch.empty(rows, dtype=torch.int64)
        self.kernels.sample(
            logits.data_ptr(),
            logits.stride(0),
            rows,
            size,
            temperatures.data_ptr(),
            uniforms.data_ptr(),
            tokens.data_ptr(),
        )
        return tokens


def attend(
    kernels: Kernels,
    shape: AttentionShape,
    step: StepTensors,
    keys: int,
    values: int,
    q: torch.Tensor,
    stride: int,
    out: torch.Tensor,
    half: bool,
) -> None:
    """Write the attention of the rows of `q` over the cache at `keys` and `values` to `out`."""
    kernels.attention(
        byref(shape), native_batch(step), keys, values, q.data_ptr(), stride, out.data_ptr(), out.shape[1], half
    )


def native_batch(step: StepTensors) -> int:
    """Return the address of the step's batch layout for the kernels. It is built once per step."""
    if step.native is None:
        pointer = ctypes.POINTER(ctypes.c_int32)
        step.native = AttentionBatch(
            len(step.first_positions),
            *(ctypes.cast(t.data_ptr(), pointer) for t in (step.row_starts, step.first_positions, step.block_tables)),
            step.block_tables.shape[1],
        )
    return addressof(step.native)
