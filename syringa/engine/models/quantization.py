"""How the weights of a Hugging Face folder are quantized, by its config."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from syringa.engine.models.config import MOE_TYPES
from syringa.engine.models.hybrid_config import HYBRID_TYPES, has_experts, language_config
from syringa.errors import ModelError

Packing = Literal["none", "gptq", "awq", "compressed"]
READABLE = "FP8, GPTQ and AWQ in 4 bits, and compressed-tensors of these can, and GGUF files"
MIN_BLOCK_OUTPUTS, MIN_BLOCK_INPUTS = 16, 32  # products of FP8 numbers take at least 32 inputs at once
_INT4_FORMATS = ("pack-quantized",)
_ACT_ORDERS = (True, "group", "dynamic")  # others reorder inputs only while weights are quantized
_FP8_FORMATS = ("float-quantized", "naive-quantized")


class Quantization(NamedTuple):
    """The quantization of a folder's linear layers."""

    method: str  # as the config names it
    bits: int  # 4 or 8
    packing: Packing = "none"  # layout of 4-bit weights
    group: int = 0  # inputs of a scale of 4-bit weights; 0 or less: all
    block: tuple[int, int] = (128, 128)  # outputs and inputs of a scale of FP8 weights that have blocks
    zero_offset: int = 0  # what is missing from the stored zero points
    act_order: bool = False  # groups are of inputs that are not side by side


def read_quantization(config: dict[str, Any]) -> Quantization | None:
    """Read a config's `quantization_config`; None if the weights are not quantized, or in MXFP4.

    Raise `ModelError` naming what cannot be read.
    """
    found = config.get("quantization_config")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(f"quantization_config {found!r} in config.json should be an object")
    method = found.get("quant_method")
    match method:
        case "mxfp4" if config.get("model_type") == "gpt_oss":
            return None  # the experts' tensors say so themselves
        case "fp8":
            _require(found, "fmt", (None, "e4m3"), "FP8 weights in the format {!r}")
            return Quantization("fp8", 8, block=_block(found.get("weight_block_size")))
        case "fbgemm_fp8":  # a scale per output
            return Quantization("fbgemm_fp8", 8)
        case "modelopt":  # a scale per tensor
            _require(found, "quant_algo", ("FP8",), "ModelOpt weights in {!r}")
            return Quantization("modelopt", 8)
        case "gptq":
            _require(found, "bits", (4,), "GPTQ weights of {} bits")
            _require(found, "checkpoint_format", (None, "gptq", "gptq_v2"), "GPTQ weights in the layout {!r}")
            # The first layout stores zero points minus one.
            offset = 0 if found.get("checkpoint_format") == "gptq_v2" else 1
            group = _integer(found, "group_size")
            reordered = bool(found.get("desc_act")) and group > 0
            return Quantization("gptq", 4, "gptq", group, zero_offset=offset, act_order=reordered)
        case "awq":
            _require(found, "bits", (4,), "AWQ weights of {} bits")
            _require(found, "version", (None, "gemm", "GEMM"), "AWQ weights in the layout {!r}")
            return Quantization("awq", 4, "awq", _integer(found, "group_size"))
        case "compressed-tensors":
            return _read_compressed(found)
    raise _unreadable(f"weights quantized with {method!r}")


def stored_dtype(config: dict[str, Any]) -> str:
    """Return the dtype of a folder's linear layers on a GPU that keeps them as they are: bf16, fp8, int4 or mxfp4.

    It is bf16, too, if the kernels cannot read the experts as they are: then all layers are converted.
    """
    quantization = read_quantization(config)
    if quantization is None:
        return "mxfp4" if config.get("quantization_config") else "bf16"
    language = language_config(config)
    kind = language.get("model_type")
    sparse = kind in MOE_TYPES or (kind in HYBRID_TYPES and has_experts(language))
    if sparse and quantization.act_order:
        return "bf16"
    return "fp8" if quantization.bits == 8 else "int4"


def _read_compressed(found: dict[str, Any]) -> Quantization:
    groups = found.get("config_groups")
    schemes = [each.get("weights") for each in groups.values()] if isinstance(groups, dict) else []
    schemes = [each for each in schemes if isinstance(each, dict)]
    if not schemes:
        raise ModelError("config.json: quantization_config has no config_groups with weights")
    for option in ("sparsity_config", "transform_config"):
        detail = found.get(option)
        if detail and not (isinstance(detail, dict) and detail.get("format") == "dense"):
            raise _unreadable(f"compressed-tensors with a {option}")
    layout = found.get("format")
    kinds = {(each.get("num_bits"), each.get("type")) for each in schemes}
    if kinds == {(8, "float")} and layout in _FP8_FORMATS:
        return Quantization("compressed-tensors", 8, block=_block(schemes[0].get("block_structure")))
    if kinds == {(4, "int")} and layout in _INT4_FORMATS:
        sizes = {each.get("group_size") or 0 for each in schemes}
        if len(sizes) != 1:
            raise _unreadable("4-bit weights in groups of several sizes")
        group = _integer(schemes[0], "group_size", 0)
        reordered = any(each.get("actorder") in _ACT_ORDERS for each in schemes)
        return Quantization("compressed-tensors", 4, "compressed", group, act_order=reordered)
    shown = ", ".join(f"{bits}-bit {kind}" for bits, kind in sorted(kinds, key=str))
    raise _unreadable(f"compressed-tensors of {shown} weights in the format {layout!r}")


def _block(value: Any) -> tuple[int, int]:
    if value is None:
        return 128, 128
    sizes = value if isinstance(value, (list, tuple)) else []
    if len(sizes) != 2 or not all(type(size) is int and size & (size - 1) == 0 for size in sizes):
        raise _unreadable(f"FP8 weights in blocks of {value!r}")
    if sizes[0] < MIN_BLOCK_OUTPUTS or sizes[1] < MIN_BLOCK_INPUTS:
        raise ModelError(
            f"FP8 weights in blocks of {sizes[0]} outputs × {sizes[1]} inputs cannot be read: blocks of at least "
            f"{MIN_BLOCK_OUTPUTS} × {MIN_BLOCK_INPUTS} can"
        )
    return sizes[0], sizes[1]


def _integer(found: dict[str, Any], name: str, default: int | None = None) -> int:
    value = found.get(name)
    if value is None and default is not None:
        return default
    if type(value) is not int:
        raise ModelError(f"config.json: quantization_config.{name} is {value!r}, and should be an integer")
    return value


def _require(found: dict[str, Any], name: str, allowed: tuple[Any, ...], what: str) -> None:
    if found.get(name) not in allowed:
        raise _unreadable(what.format(found.get(name)))


def _unreadable(what: str) -> ModelError:
    return ModelError(f"{what} cannot be read: {READABLE}")
