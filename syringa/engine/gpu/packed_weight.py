"""Quantized weights in the layout of the kernels in `kernels.quantized_gemm`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from syringa.engine.loading.quantized import INT4_ZERO, QuantizedWeight, WeightFormat, quantize_fp8

BLOCK_SCALES_CAPABILITY = 9  # major compute capability
FOUR_BIT_UNIT = 128  # inputs of a unit of 4-bit weights, or twice the group if that is less


@dataclass(frozen=True)
class PackedWeight:
    """A quantized matrix, or those of all experts of a layer, with one more dimension in front.

    `data`: FP8 as `[outputs, inputs]`; 4-bit codes as bytes `[outputs, padded inputs / 2]`, byte j of a unit with input
    j of that unit in its low bits and input j + unit / 2 in its high bits. `scales`, `zeros`: `[groups, outputs]`.
    """

    format: WeightFormat
    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    inputs: int
    group: int  # inputs of a scale; the last group may be smaller
    unit: int  # inputs that the kernels multiply at once; 0: any number
    order: torch.Tensor | None = None  # column i is input order[i]; None: i
    cublas_scales: torch.Tensor | None = None  # of FP8, in the layout of `torch._scaled_mm`; None: it has none

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.data.shape[:-1], self.inputs)

    @property
    def per_channel(self) -> bool:
        """Whether each output has one scale, and FP8 weights."""
        return self.format == "fp8" and self.scales.shape[-2] == 1

    @property
    def row_group(self) -> int:
        """The inputs that share a scale in rows quantized to FP8; 0: all."""
        return 0 if self.per_channel else self.group

    def __len__(self) -> int:
        return len(self.data)


@dataclass(frozen=True)
class Fp8Rows:
    """Activations that are quantized for the product with one weight."""

    values: torch.Tensor  # e4m3, `[rows, inputs]`, with uninitialized rows at the end
    scales: torch.Tensor  # `[groups, rows]`
    rows: int  # without those at the end
    dtype: torch.dtype  # of the rows before quantization


def pack_weight(weight: QuantizedWeight) -> PackedWeight:
    """Return a matrix in the layout of the kernels."""
    data, group = weight.data, weight.group
    inputs = data.shape[-1]
    scales = weight.scales.transpose(-1, -2).contiguous()
    if weight.format == "fp8":
        unit = 0 if scales.shape[-2] == 1 else group
        return PackedWeight(
            "fp8", data.contiguous(), scales, None, inputs, group, unit, cublas_scales=_cublas_scales(weight)
        )
    zeros = None if weight.zeros is None else weight.zeros.transpose(-1, -2).contiguous()
    unit = FOUR_BIT_UNIT if scales.shape[-2] == 1 else min(FOUR_BIT_UNIT, 2 * group)
    codes = F.pad(data, (0, -inputs % unit)).unflatten(-1, (-1, 2, unit // 2))
    packed = (codes[..., 0, :] | codes[..., 1, :] << 4).flatten(-2).contiguous()
    if scales.shape[-2] == 1:
        group = 2 * packed.shape[-1]
    missing = -(-2 * packed.shape[-1] // group) - scales.shape[-2]
    if missing > 0:  # the padding reaches into a group that does not exist; its inputs are zero
        scales = F.pad(scales, (0, 0, 0, missing))
        zeros = None if zeros is None else F.pad(zeros, (0, 0, 0, missing))
    return PackedWeight(weight.format, packed, scales, zeros, inputs, group, unit, weight.order)


def _cublas_scales(weight: QuantizedWeight) -> torch.Tensor | None:
    """Return one scale per output, or per block of 128 × 128, if cuBLAS has a product for them."""
    outputs, inputs = weight.data.shape
    groups = weight.scales.shape[1]
    if groups == 1:
        return weight.scales.reshape(1, outputs) if inputs % 16 == 0 and outputs % 16 == 0 else None
    if weight.group != 128 or inputs % 512 or outputs % 128 or not multiplies_blocks(weight.data.device):
        return None
    blocks = weight.scales.view(-1, 128, groups)  # in a block, all outputs have the same scale
    return blocks[:, 0].contiguous().t() if bool((blocks == blocks[:, :1]).all()) else None


def multiplies_blocks(device: torch.device) -> bool:
    """Return whether `torch._scaled_mm` takes scales of 128 × 128 blocks: PyTorch implements that for Hopper only."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == BLOCK_SCALES_CAPABILITY


def pack_fp8(weight: torch.Tensor) -> PackedWeight:
    """Quantize a matrix to FP8 with one scale per output."""
    data, scale = quantize_fp8(weight)
    return pack_weight(QuantizedWeight("fp8", data, scale, weight.shape[-1]))


def unpack_weight(weight: PackedWeight) -> torch.Tensor:
    """Return the matrix in fp32, with columns as the kernels multiply them (the reference of `dequantize`)."""
    data = weight.data
    if weight.format != "fp8":
        units = data.unflatten(-1, (-1, weight.unit // 2))
        data = torch.stack([units & 15, units >> 4], dim=-2).flatten(-3)[..., : weight.inputs]
    scales = weight.scales.transpose(-1, -2)
    zeros = None if weight.zeros is None else weight.zeros.transpose(-1, -2)
    return QuantizedWeight(weight.format, data, scales, weight.group, zeros).dequantize()


def concat_quantized(weights: list[QuantizedWeight | None]) -> QuantizedWeight | None:
    """Return the matrices one below the other, or None if one is not quantized, or not like the others."""
    parts = [weight for weight in weights if weight is not None]
    if len(parts) < len(weights):
        return None
    first = parts[0]
    for part in parts[1:]:
        same_order = part.order is first.order or (
            part.order is not None and first.order is not None and torch.equal(part.order, first.order)
        )
        if (part.format, part.group) != (first.format, first.group) or not same_order:
            return None
    zeros = _filled_zeros(parts)
    data, scales = torch.cat([part.data for part in parts]), torch.cat([part.scales for part in parts])
    return replace(first, data=data, scales=scales, zeros=None if zeros is None else torch.cat(zeros))


def stack_packed(weights: list[PackedWeight]) -> PackedWeight:
    """Return the matrices of experts as one weight."""
    first = weights[0]
    zeros = _filled_zeros(weights)
    data, scales = torch.stack([w.data for w in weights]), torch.stack([w.scales for w in weights])
    stacked = None if zeros is None else torch.stack(zeros)
    return replace(first, data=data, scales=scales, zeros=stacked, cublas_scales=None)


def _filled_zeros(weights: Sequence[QuantizedWeight | PackedWeight]) -> list[torch.Tensor] | None:
    """Return the zero points of all weights, or None if none has any."""
    if all(weight.zeros is None for weight in weights):
        return None
    return [
        torch.full_like(weight.scales, INT4_ZERO, dtype=torch.uint8) if weight.zeros is None else weight.zeros
        for weight in weights
    ]
