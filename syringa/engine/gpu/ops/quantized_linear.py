"""Linear layers with quantized weights, by the kernel that is fastest for the number of rows.

One or two rows are multiplied on CUDA cores (INT4, and FP8 with a scale per output), up to 16 in bf16 with weights that
are converted in registers. More rows are quantized to FP8 if the weights are, with a scale for each that the weights
have along the inputs, and more than 64 multiplied by cuBLAS, unless its tiles are too few. With 4-bit weights, rows
stay in bf16; of very many rows, the weights are converted once, for cuBLAS. The configurations are the best on
an H200 of those that bench/gpu_quantized.py tries.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton

from syringa.engine.gpu.kernels.elementwise import rms_norm
from syringa.engine.gpu.kernels.fixed_point import fixed_point_rows
from syringa.engine.gpu.kernels.fp8 import quantize_rows
from syringa.engine.gpu.kernels.gemv import GemvConfig, gemv
from syringa.engine.gpu.kernels.int4_gemv import Int4GemvConfig, int4_gemv, supports_int4_gemv
from syringa.engine.gpu.kernels.launch import num_processors
from syringa.engine.gpu.kernels.quantized_gemm import QuantizedConfig, dequantize, quantized_gemm
from syringa.engine.gpu.packed_weight import Fp8Rows, PackedWeight

GEMV_ROWS = 2
FUSED_ROWS = 64
DEQUANTIZED_ROWS = 384  # from here on, converting the weights first is faster
FEW_TILES_ROWS = 256  # up to here, a product of FP8 rows with few tiles takes our kernel instead of cuBLAS
CUBLAS_BLOCK_ROWS = 4  # with scales per block, cuBLAS needs a multiple of this

QuantizedLinearConfig = GemvConfig | Int4GemvConfig | QuantizedConfig


def quantized_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: QuantizedLinearConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """`linear.linear` with quantized weights, for a few rows."""
    outputs = len(weight) // 2 if gated else len(weight)
    out = x.new_empty(len(x), outputs) if out is None else out
    if not len(x):
        return out
    config = config or choose_quantized_config(len(x), outputs, weight, gated, x.dtype)
    if isinstance(config, QuantizedConfig) and config.fp8_rows:
        x, scales = quantize_rows(x, weight.row_group, norm_weight=norm_weight, eps=eps, pdl=pdl)
        quantized_gemm(x, weight, bias, out, config, gated=gated, residual=residual, x_scales=scales, pdl=pdl)
        return out
    if isinstance(config, Int4GemvConfig):
        row = fixed_point_rows(x, weight.unit, order=weight.order, norm_weight=norm_weight, eps=eps, pdl=pdl)
        int4_gemv(row, weight, bias, out, config, gated=gated, residual=residual, pdl=pdl)
        return out
    if norm_weight is not None:  # fused into a GEMV, its weights would be as many bytes to read as those of the layer
        x = rms_norm(x, norm_weight, eps, pdl=pdl)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if isinstance(config, GemvConfig):
        gemv(x, weight.data, bias, None, eps, gated, residual, out, config, pdl, weight.scales)
    else:
        quantized_gemm(x, weight, bias, out, config, gated=gated, residual=residual, pdl=pdl)
    return out


def multiplies_fp8_rows(rows: int, weight: torch.Tensor | PackedWeight | None) -> bool:
    """Return whether `quantized_matmul` quantizes so many rows for this weight, and takes them as `Fp8Rows`."""
    return rows > FUSED_ROWS and isinstance(weight, PackedWeight) and weight.cublas_scales is not None


def quantize_for(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> Fp8Rows:
    """Return rows as `quantized_matmul` multiplies them with this weight. The options are those of `quantize_rows`."""
    multiple = 1 if weight.per_channel else CUBLAS_BLOCK_ROWS
    values, scales = quantize_rows(
        x, weight.row_group, norm_weight=norm_weight, eps=eps, residual=residual, gated=gated, multiple=multiple
    )
    return Fp8Rows(values, scales, len(x), x.dtype)


def quantized_matmul(x: torch.Tensor | Fp8Rows, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer with quantized weights for any number of rows, without fusion."""
    if isinstance(x, torch.Tensor) and multiplies_fp8_rows(len(x), weight):
        x = quantize_for(x, weight)
    if isinstance(x, Fp8Rows) and (config := few_tiles_config(x.rows, weight)) is not None:
        y = torch.empty(len(x.values), len(weight), dtype=x.dtype, device=x.values.device)
        quantized_gemm(x.values, weight, bias, y, config, x_scales=x.scales)
        return y[: x.rows]
    if isinstance(x, Fp8Rows):
        assert weight.cublas_scales is not None
        y = torch._scaled_mm(
            x.values,
            weight.data.t(),
            x.scales.t(),
            weight.cublas_scales,
            out_dtype=x.dtype,
            use_fast_accum=weight.per_channel,  # which block scales do not support
        )[: x.rows]
        return y if bias is None else y.add_(bias)
    if len(x) < DEQUANTIZED_ROWS:
        return quantized_linear(x, weight, bias)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    return F.linear(x, dequantize(weight, x.dtype), bias)


def choose_quantized_config(
    rows: int, outputs: int, weight: PackedWeight, gated: bool, dtype: torch.dtype = torch.bfloat16
) -> QuantizedLinearConfig:
    """Return the kernel configuration for a shape. `dtype`: of the rows."""
    fp8, processors = weight.format == "fp8", num_processors()
    if rows <= GEMV_ROWS and weight.per_channel:
        return _gemv_config(outputs, weight.inputs, gated)
    if supports_int4_gemv(weight, rows, dtype):
        return _int4_gemv_config(outputs, weight.inputs, gated)
    if rows <= 16:
        config = QuantizedConfig(16, 32, 256, 2, 4) if fp8 else QuantizedConfig(16, 32, 512, 2, 3)
        return _split(config, rows, outputs, weight, 4 * processors)
    if rows > FUSED_ROWS:
        if rows > 128:
            return _split(QuantizedConfig(128, 128, 128, 8, 3), rows, outputs, weight, processors)
        return _split(QuantizedConfig(64, 64, 128, 4, 4), rows, outputs, weight, 2 * processors)
    block = 32 if rows <= 32 else 64
    if gated:
        return QuantizedConfig(block, 128, 128, 8, 4, fp8_rows=True) if fp8 else QuantizedConfig(block, 64, 128, 4, 4)
    if weight.per_channel:
        return _split(QuantizedConfig(block, 64, 128, 4, 6, fp8_rows=True), rows, outputs, weight, processors)
    if fp8 and outputs > 4096:
        return _split(QuantizedConfig(block, 128, 128, 4, 4, fp8_rows=True), rows, outputs, weight, processors)
    config = QuantizedConfig(block, 64, 128, 4, 4) if fp8 else QuantizedConfig(block, 64, 256, 4, 3)
    return _split(config, rows, outputs, weight, 2 * processors)


def few_tiles_config(rows: int, weight: PackedWeight) -> QuantizedConfig | None:
    """Return the configuration for rows in FP8 where cuBLAS has too few tiles for the device, or None.

    With scales per block, cuBLAS is faster.
    """
    config, processors = QuantizedConfig(64, 64, 128, 4, 6, fp8_rows=True), num_processors()
    tiles = triton.cdiv(rows, config.rows) * triton.cdiv(len(weight), config.outputs)
    if not weight.per_channel or rows > FEW_TILES_ROWS or tiles > 2 * processors:
        return None
    return _split(config, rows, len(weight), weight, (2 if weight.inputs > 8192 else 1) * processors)


def _split(config: QuantizedConfig, rows: int, outputs: int, weight: PackedWeight, programs: int) -> QuantizedConfig:
    """Return the configuration with as many splits as make about so many programs."""
    tiles = triton.cdiv(outputs, config.outputs) * triton.cdiv(rows, config.rows)
    return config._replace(splits=max(1, min(round(programs / tiles), weight.inputs // 512)))


def _int4_gemv_config(outputs: int, inputs: int, gated: bool) -> Int4GemvConfig:
    if inputs > 8192:
        return Int4GemvConfig(4096, 4)
    return Int4GemvConfig(2048 if gated else 4096, 1)


def _gemv_config(outputs: int, inputs: int, gated: bool) -> GemvConfig:
    if inputs > 8192:
        return GemvConfig(2, 4096, 8)
    if inputs >= 4096:
        return GemvConfig(2, 4096, 4) if gated else GemvConfig(4 if outputs > 4096 else 2, 2048, 4)
    if inputs > 1024:
        return GemvConfig(2, 1024, 4)
    return GemvConfig(4, triton.next_power_of_2(inputs), 4)
