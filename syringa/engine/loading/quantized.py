"""Quantized weights of Hugging Face folders: FP8, GPTQ, AWQ and compressed-tensors, in one common form.

A layer is quantized if its tensors say so, whatever lists of exceptions its config has. Activations are not quantized
by the checkpoint's scheme: their scales (`input_scale`) are not read, nor are those of a quantized KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch

from syringa.engine.loading.device_copy import copy_weight
from syringa.engine.loading.weights import SafetensorsWeights
from syringa.engine.models.config import MXFP4_GROUP
from syringa.engine.models.quantization import Quantization
from syringa.errors import ModelError

WeightFormat = Literal["fp8", "int4", "mxfp4"]
FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = 448.0  # largest e4m3 number
INT4_ZERO = 8  # the code of 0 of symmetric 4-bit weights
INT4_GROUPS = (32, 64)  # besides multiples of 128 and whole rows
MXFP4_NAN = 255  # the exponent of a scale of MXFP4 that is not a number
_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")  # of tensors that are not quantized, as safetensors names them
REMEDY = "fetch the model again, or use another conversion of it"
# The inputs or outputs in the eight 4-bit fields of an AWQ word, from the lowest bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# The values of e2m1 by their four bits: sign, two bits of exponent, one of mantissa.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix `[outputs, inputs]` of small numbers, times a scale per output and group of inputs.

    `data`: FP8 (e4m3), or one 4-bit code per byte. `scales`: `[outputs, groups]`, floating point. `zeros`: the code of
    0, `[outputs, groups]`; None: `INT4_ZERO`.
    """

    format: WeightFormat
    data: torch.Tensor
    scales: torch.Tensor
    group: int  # inputs of a scale; the last group may be smaller
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None  # column i is input order[i] of the layer (act-order of GPTQ); None: i

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in fp32, with its columns in the order of the layer's inputs."""
        inputs = self.data.shape[-1]

        def per_input(values: torch.Tensor) -> torch.Tensor:
            return values.float().repeat_interleave(self.group, -1)[..., :inputs]

        if self.format == "mxfp4":
            numbers = torch.tensor(E2M1_VALUES, device=self.data.device)[self.data.int()]
        else:
            numbers = self.data.float()
        if self.format == "int4":
            numbers = numbers - (INT4_ZERO if self.zeros is None else per_input(self.zeros))
        values = numbers * per_input(self.scales)
        if self.order is None:
            return values
        restored = torch.empty_like(values)
        restored[..., self.order] = values
        return restored


ReadQuantized = Callable[[str, torch.device], QuantizedWeight | None]  # a weight as it is stored, if it is quantized


class QuantizedWeights:
    """Tensors of a quantized folder by their Hugging Face names, dequantized to fp32 when they are read by name.

    Raise `ModelError` for tensors that are missing or have a wrong shape or dtype.
    """

    def __init__(self, files: SafetensorsWeights, quantization: Quantization) -> None:
        self._files = files
        self._quantization = quantization
        self._first = "weight_packed" if quantization.packing == "compressed" else "qweight"

    def has(self, name: str) -> bool:
        return self._files.has(name) or self._packed(name) is not None

    def is_quantized(self, name: str) -> bool:
        """Return whether a tensor is a matrix that is stored quantized."""
        if not name.endswith(".weight"):
            return False
        return self._packed(name) is not None or (self._files.has(name) and self._files.dtype(name) == "F8_E4M3")

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, of a packed weight that of its matrix."""
        packed = self._packed(name)
        if packed is None:
            return self._files.shape(name)
        rows, columns = self._matrix_shape(packed)
        if self._quantization.packing == "gptq":
            return columns, 8 * rows
        if self._quantization.packing == "awq":
            return 8 * columns, rows
        return rows, 8 * columns

    def __call__(self, name: str) -> torch.Tensor:
        found = self.quantized(name)
        if found is not None:
            return found.dequantize()
        if self._files.has(name) and (dtype := self._files.dtype(name)) not in _FLOAT_DTYPES:
            self._refuse_stored(name, dtype)
        return self._files(name)

    def quantized(self, name: str, device: torch.device | str = "cpu") -> QuantizedWeight | None:
        """Return a weight as it is stored, on `device`; None if it is not quantized."""
        if not self.is_quantized(name):
            return None
        prefix = name.removesuffix("weight")
        return self._int4(prefix, device) if self._packed(name) is not None else self._fp8(prefix, device)

    def _packed(self, name: str) -> str | None:
        if not name.endswith(".weight") or self._files.has(name):
            return None
        packed = name.removesuffix("weight") + self._first
        return packed if self._files.has(packed) else None

    def _matrix_shape(self, name: str) -> tuple[int, int]:
        """Return the shape of a stored tensor that should have two dimensions."""
        shape = self._files.shape(name)
        if len(shape) != 2:
            raise ModelError(f"{self._files.folder}: {name} is {list(shape)}, and should be a matrix: {REMEDY}")
        return shape[0], shape[1]

    def _fp8(self, prefix: str, device: torch.device | str) -> QuantizedWeight:
        outputs, inputs = self._matrix_shape(prefix + "weight")
        weight = copy_weight(self._files.read(prefix + "weight"), device)
        name = next((n for n in ("weight_scale_inv", "weight_scale") if self._files.has(prefix + n)), "weight_scale")
        scale = self._files.read(prefix + name)
        rows, columns = self._quantization.block
        if not scale.is_floating_point():
            self._refuse(prefix + name, scale, "scales in floating point")
        scale = scale.float()
        self._check_finite(prefix + name, scale)
        scale = scale.to(device)
        if scale.numel() == 1:
            return QuantizedWeight("fp8", weight, scale.reshape(1, 1).expand(outputs, 1).contiguous(), inputs)
        if scale.numel() == outputs and scale.shape[0] == outputs:
            return QuantizedWeight("fp8", weight, scale.reshape(outputs, 1), inputs)
        if scale.shape != (-(-outputs // rows), -(-inputs // columns)):
            expected = f"scales of {outputs} × {inputs} weights in blocks of {rows} × {columns}"
            self._refuse(prefix + name, scale, expected)
        return QuantizedWeight("fp8", weight, scale.repeat_interleave(rows, 0)[:outputs].contiguous(), columns)

    def _int4(self, prefix: str, device: torch.device | str) -> QuantizedWeight:
        outputs, inputs = self.shape(prefix + "weight")
        packing, group = self._quantization.packing, self._quantization.group
        group = inputs if group <= 0 or group > inputs else group
        if group != inputs and group not in INT4_GROUPS and group % 128:
            raise ModelError(
                f"{self._files.folder}: 4-bit weights in groups of {group} cannot be read: groups of 32, 64 and 128 can"
            )
        groups = -(-inputs // group)

        def read(name: str, shape: tuple[int, ...], dtype: torch.dtype | None = torch.int32) -> torch.Tensor:
            tensor = self._files.read(prefix + name)
            is_scale = tensor.is_floating_point() and tensor.dtype.itemsize >= 2
            if tuple(tensor.shape) != shape or not (tensor.dtype == dtype if dtype else is_scale):
                self._refuse(prefix + name, tensor, f"{'scales' if dtype is None else dtype} of shape {list(shape)}")
            if dtype is None:
                self._check_finite(prefix + name, tensor)
            return copy_weight(tensor, device)

        zeros = order = None
        if packing == "compressed":
            codes = unpack_words(read("weight_packed", (outputs, -(-inputs // 8))))[:, :inputs]
            scales = read("weight_scale", (outputs, groups), None)
            if self._files.has(prefix + "weight_zero_point"):
                zeros = unpack_words(read("weight_zero_point", (-(-outputs // 8), groups)).T).T[:outputs]
        elif packing == "awq":
            codes = unpack_words(read("qweight", (inputs, outputs // 8)), AWQ_ORDER).T
            zeros = unpack_words(read("qzeros", (groups, outputs // 8)), AWQ_ORDER).T
            scales = read("scales", (groups, outputs), None).T
        else:
            codes = unpack_words(read("qweight", (inputs // 8, outputs)).T)
            zeros = unpack_words(read("qzeros", (groups, outputs // 8))).T + self._quantization.zero_offset
            scales = read("scales", (groups, outputs), None).T
        index = next((n for n in ("g_idx", "weight_g_idx") if self._files.has(prefix + n)), None)
        if index is not None:
            of_input = read(index, (inputs,)).long()
            in_order = torch.arange(inputs, device=device) // group
            is_set = bool((of_input != -1).any())  # compressed-tensors may store -1, as if there were no index
            if is_set and not torch.equal(of_input, in_order):
                order = of_input.argsort(stable=True)
                if not torch.equal(of_input[order], in_order):
                    raise ModelError(f"{self._files.folder}: {prefix}{index} does not have groups of {group} inputs")
                codes = codes[:, order]
        if zeros is not None and bool((zeros == INT4_ZERO).all()):
            zeros = None
        return QuantizedWeight(
            "int4", codes.contiguous(), scales.contiguous(), group, None if zeros is None else zeros.contiguous(), order
        )

    def _check_finite(self, name: str, scales: torch.Tensor) -> None:
        """Raise `ModelError` if a scale is not finite. It may be negative: some tools choose its sign, too."""
        if not bool(scales.isfinite().all()):
            raise ModelError(f"{self._files.folder}: {name} is corrupt: a scale is not a finite number: {REMEDY}")

    def _refuse_stored(self, name: str, dtype: str) -> NoReturn:
        """Raise `ModelError` for a quantized tensor that is not a layer's matrix."""
        if len(self._files.shape(name)) == 3:
            raise ModelError(
                f"{self._files.folder}: {name} is {dtype}, and the experts of a layer in one quantized tensor "
                "cannot be read: use a folder with a matrix per expert, the original folder, or a GGUF file"
            )
        raise ModelError(
            f"{self._files.folder}: {name} is {dtype}, which cannot be read as {self._quantization.method}: use the "
            "original folder, or a GGUF file"
        )

    def _refuse(self, name: str, tensor: torch.Tensor, expected: str) -> NoReturn:
        kind = f"{tensor.dtype} {list(tensor.shape)}"
        raise ModelError(f"{self._files.folder}: {name} is {kind}, and its config says {expected}: {REMEDY}")


def unpack_words(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return the 4-bit fields of int32 words as bytes, along the last dimension. `order`: place of each field."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device).argsort().int() * 4
    return ((words[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)


def check_mxfp4_scales(exponents: torch.Tensor, name: str) -> None:
    """Raise `ModelError` if one of the stored scales is not a number."""
    if bool((exponents == MXFP4_NAN).any()):
        raise ModelError(f"{name} is corrupt: a scale is not a number: {REMEDY}")


def mxfp4_weight(blocks: torch.Tensor, scales: torch.Tensor) -> QuantizedWeight:
    """Return a matrix of MXFP4 weights, `[rows, 32 · groups]`.

    `blocks`: `[rows, groups, 16]`, uint8, two e2m1 numbers per byte, the low four bits first. `scales`: `[rows,
    groups]`, uint8, the exponent of two of each group of 32 numbers plus 127.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
    powers = (scales.short() << 7).view(torch.bfloat16)  # bf16 has the same exponents
    return QuantizedWeight("mxfp4", codes, powers, MXFP4_GROUP)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in e4m3 and their scales, `[rows, 1]`."""
    scale = (x.abs().amax(-1, keepdim=True).float() / FP8_MAX).clamp(min=1e-12)
    return (x.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE), scale
