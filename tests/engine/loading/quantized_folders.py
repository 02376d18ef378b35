"""Quantizes saved models in place, by the documented layouts of checkpoints, with the matrices that they stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from syringa.engine.loading.quantized import quantize_fp8

GROUP = 32  # inputs of a scale, and in `fp8 blocks` outputs
AWQ_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)  # what the eight fields of a word hold, from the lowest bits on
LINEAR = r"\.(.*_proj(_qkvz|_qkv|_z)?|w[123])\.weight$"  # layers that tools quantize, and not routers or small gates
Tensors = dict[str, torch.Tensor]

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# The `quantization_config` of each layout.
LAYOUTS: dict[str, dict[str, Any]] = {
    "fp8 tensor": FP8 | {"activation_scheme": "static"},
    "fp8 channel": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "fp8 blocks": FP8 | {"weight_block_size": [GROUP, GROUP]},
    "gptq": GPTQ,
    "gptq act-order": GPTQ | {"desc_act": True},
    "awq": AWQ,
    "compressed": compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
}


class QuantizedMatrix(NamedTuple):
    tensors: Tensors  # by the part of their name that replaces "weight"
    matrix: torch.Tensor  # what they stand for, fp32


def pack(fields: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return int32 words of eight 4-bit fields along the last dimension, field `order[i]` in bits 4i to 4i + 3."""
    grouped = fields.unflatten(-1, (-1, 8)).long()
    words = torch.stack([grouped[..., order[i]] << 4 * i for i in range(8)]).sum(0)
    return words.to(torch.uint32).view(torch.int32)


def quantize_matrix(matrix: torch.Tensor, layout: str, seed: int = 0) -> QuantizedMatrix:
    """Quantize `[outputs, inputs]`, multiples of `GROUP`. `seed`: of the order of inputs in act-order."""
    return _fp8(matrix.float(), layout) if layout.startswith("fp8") else _int4(matrix.float(), layout, seed)


def _fp8(matrix: torch.Tensor, layout: str) -> QuantizedMatrix:
    if layout == "fp8 channel":
        data, scale = quantize_fp8(matrix)
        return QuantizedMatrix({"weight": data, "weight_scale": scale}, data.float() * scale)
    if layout == "fp8 tensor":
        data, scale = quantize_fp8(matrix.reshape(1, -1))
        tensors = {"weight": data.view(matrix.shape), "weight_scale": scale[0, 0]}
        tensors["input_scale"] = torch.tensor(0.7)  # of activations, which are quantized without it
        return QuantizedMatrix(tensors, tensors["weight"].float() * scale)
    blocks = matrix.unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP)).transpose(1, 2)  # [rows, columns, GROUP, GROUP]
    data, scale = quantize_fp8(blocks.flatten(2).flatten(0, 1))
    scale = scale.view(blocks.shape[:2])

    def whole(values: torch.Tensor) -> torch.Tensor:
        return values.view(blocks.shape).transpose(1, 2).reshape(matrix.shape)

    expanded = scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    data = whole(data.view(torch.uint8)).view(data.dtype)
    return QuantizedMatrix({"weight": data, "weight_scale_inv": scale}, data.float() * expanded)


def _int4(matrix: torch.Tensor, layout: str, seed: int) -> QuantizedMatrix:
    outputs, inputs = matrix.shape
    groups = torch.arange(inputs) // GROUP
    if layout == "gptq act-order":
        groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(seed))]
    columns = matrix[:, groups.argsort(stable=True)].view(outputs, -1, GROUP)
    low, high = columns.amin(-1).clamp(max=0), columns.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).clamp(min=1e-6).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)  # the first layout of GPTQ cannot store 0
    codes = (matrix / scales.float()[:, groups] + zeros[:, groups]).round().clamp(0, 15)
    found = (codes - zeros[:, groups]) * scales.float()[:, groups]
    if layout == "compressed":
        tensors = {"weight_packed": pack(codes), "weight_scale": scales, "weight_zero_point": pack(zeros.T).T}
        return QuantizedMatrix(tensors | {"weight_shape": torch.tensor([outputs, inputs])}, found)
    if layout == "awq":
        tensors = {"qweight": pack(codes.T, AWQ_FIELDS), "qzeros": pack(zeros.T, AWQ_FIELDS), "scales": scales.T}
        return QuantizedMatrix(tensors, found)
    tensors = {"qweight": pack(codes).T, "qzeros": pack(zeros.T - 1), "scales": scales.T, "g_idx": groups.int()}
    return QuantizedMatrix(tensors, found)


def quantize_tensors(
    tensors: Tensors, layout: str, *, pattern: str = LINEAR, same_order: bool = True
) -> tuple[Tensors, Tensors]:
    """Return the tensors of a model with its linear layers quantized, and those that they stand for.

    `same_order`: in act-order, the layers have the inputs in the same order, or else each its own.
    """
    quantized: Tensors = {}
    plain: Tensors = {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if not re.search(pattern, name):
            quantized[name] = plain[name] = tensor
            continue
        parts, plain[name] = quantize_matrix(tensor, layout, 0 if same_order else seed)
        prefix = name.removesuffix("weight")
        quantized |= {prefix + part: value.contiguous() for part, value in parts.items()}
    return quantized, plain


def quantize_folder(folder: Path, layout: str, plain_folder: Path | None = None, **options: Any) -> None:
    """Quantize a saved model in place. `plain_folder` gets the model that it stands for then, in fp32."""
    quantized, plain = quantize_tensors(load_file(folder / "model.safetensors"), layout, **options)
    if plain_folder is not None:
        copy_files(folder.glob("*.json"), plain_folder)
        save_file(plain, plain_folder / "model.safetensors", {"format": "pt"})
    save_file(quantized, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config=LAYOUTS[layout])


def copy_files(files: Iterable[Path], folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for file in files:
        (folder / file.name).write_bytes(file.read_bytes())


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
