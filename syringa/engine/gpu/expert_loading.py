"""Read the experts of a layer from the layouts of checkpoints into that of the kernels: outputs × inputs, gates first.

Qwen3-MoE, GLM-4.5 and Mixtral have three matrices per expert. gpt-oss has two tensors for all experts of a layer, with
gates and ups interleaved: in bf16 as inputs × outputs, or in MXFP4 as outputs × inputs.
"""

from __future__ import annotations

import torch

from syringa.engine.gpu.decoder import GpuExperts, GpuLinear
from syringa.engine.gpu.kernels.reference import SigmoidScores
from syringa.engine.gpu.packed_weight import PackedWeight, concat_quantized, pack_fp8, pack_weight, stack_packed
from syringa.engine.loading.device_copy import copy_weight
from syringa.engine.loading.quantized import ReadQuantized, check_mxfp4_scales, mxfp4_weight
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.layers import ReadWeight
from syringa.errors import ModelError


def load_experts(
    config: DecoderConfig,
    weights: ReadWeight,
    layer: int,
    device: torch.device,
    dtype: torch.dtype,
    quantized: ReadQuantized | None = None,
    *,
    fp8: bool = False,
) -> GpuExperts:
    """Load the router and the experts of a layer, one tensor at a time on the host.

    With `quantized`, experts stay as they are stored where the kernels can read them. With `fp8`, others are quantized.
    Shared experts are the last of the result, unless they are stored otherwise than the rest: then it has none.
    """
    prefix, names = f"model.layers.{layer}.", config.expert_names

    def on_device(name: str) -> torch.Tensor:
        return copy_weight(weights(prefix + name), device).to(dtype)

    if not config.packed_experts:
        stored = _load_stored(config, prefix, device, quantized) if quantized else None
        gate_up, down = stored or _load_separate(config, weights, prefix, device, dtype)
        shared = len(gate_up) - config.experts
        if fp8:
            gate_up, down = _in_fp8(gate_up), _in_fp8(down)
        router = GpuLinear(on_device(f"{names.router}.weight"))
        sigmoid = None
        if config.sigmoid_scale is not None:
            sigmoid = SigmoidScores(
                copy_weight(weights(prefix + names.correction), device).float(), config.sigmoid_scale
            )
        return GpuExperts(
            router,
            gate_up,
            down,
            config.experts_per_token,
            config.normalize_experts,
            sigmoid=sigmoid,
            shared=shared,
        )
    gate_up, down = (
        _load_packed(config, weights, f"{prefix}{names.experts}.{name}", device, dtype, keep=quantized is not None)
        for name in ("gate_up_proj", "down_proj")
    )
    if fp8:
        gate_up, down = _in_fp8(gate_up), _in_fp8(down)
    biases = tuple(
        torch.stack([_deinterleave(bias, name) for bias in on_device(f"{names.experts}.{name}_bias")])
        for name in ("gate_up_proj", "down_proj")
    )
    return GpuExperts(
        GpuLinear(on_device(f"{names.router}.weight"), on_device(f"{names.router}.bias")),
        gate_up,
        down,
        config.experts_per_token,
        config.normalize_experts,
        (biases[0], biases[1]),
        config.swiglu,
    )


def _in_fp8(experts: torch.Tensor | PackedWeight) -> PackedWeight:
    """Return the experts with one scale per output; quantized ones as they are."""
    return experts if isinstance(experts, PackedWeight) else stack_packed([pack_fp8(each) for each in experts])


def _load_stored(
    config: DecoderConfig, prefix: str, device: torch.device, quantized: ReadQuantized
) -> tuple[PackedWeight, PackedWeight] | None:
    """Return the experts as they are stored, with one shared expert last if it is quantized like them.

    None if they are not quantized alike. Raise `ModelError` for reordered inputs that the config does not tell of:
    memory was not planned for their conversion.
    """
    names, gate_ups, downs = config.expert_names, [], []
    for module in [f"{names.experts}.{e}" for e in range(config.experts)]:
        found = _read_stored(config, prefix + module, device, quantized)
        if found is None:
            return None
        gate_ups.append(found[0])
        downs.append(found[1])
    if config.shared_experts == 1:
        found = _read_stored(config, prefix + names.shared, device, quantized)
        if found is not None and _is_like(found[0], gate_ups[0]) and _is_like(found[1], downs[0]):
            gate_ups.append(found[0])
            downs.append(found[1])
    return stack_packed(gate_ups), stack_packed(downs)


def _read_stored(
    config: DecoderConfig, module: str, device: torch.device, quantized: ReadQuantized
) -> tuple[PackedWeight, PackedWeight] | None:
    """Return the matrices of one expert as they are stored: gates and ups, and downs; None if they are not alike."""
    gate, up, out = (quantized(f"{module}.{each}.weight", device) for each in config.expert_names.projections)
    gate_up = concat_quantized([gate, up])
    if gate_up is None or out is None:
        return None
    if gate_up.order is not None or out.order is not None:
        raise ModelError(f"{module} has its inputs in act-order, and config.json does not say so: use --dtype bf16")
    return pack_weight(gate_up), pack_weight(out)


def _is_like(weight: PackedWeight, other: PackedWeight) -> bool:
    return (weight.format, weight.shape, weight.group) == (other.format, other.shape, other.group)


def _load_separate(
    config: DecoderConfig, weights: ReadWeight, prefix: str, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts that have three matrices each, the shared ones last."""
    names, size = config.expert_names, config.expert_intermediate
    count = config.experts + config.shared_experts
    gate_up = torch.empty(count, 2 * size, config.hidden, dtype=dtype, device=device)
    down = torch.empty(count, config.hidden, size, dtype=dtype, device=device)

    def read(module: str) -> list[torch.Tensor]:
        return [copy_weight(weights(f"{prefix}{module}.{each}.weight"), device) for each in names.projections]

    for e in range(config.experts):
        gate_up[e, :size], gate_up[e, size:], down[e] = read(f"{names.experts}.{e}")
    if config.shared_experts:  # each is a part of the intermediate size
        gate, up, out = read(names.shared)
        gate_up[config.experts :, :size] = gate.view(-1, size, config.hidden)
        gate_up[config.experts :, size:] = up.view(-1, size, config.hidden)
        down[config.experts :] = out.view(config.hidden, -1, size).transpose(0, 1)
    return gate_up, down


def _load_packed(
    config: DecoderConfig,
    weights: ReadWeight,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    keep: bool,
) -> torch.Tensor | PackedWeight:
    """Return one projection of experts that share a tensor. `keep`: in MXFP4, if it is stored so."""
    if config.mxfp4:
        exponents = weights(f"{name}_scales")
        check_mxfp4_scales(exponents, f"{name}_scales")
        blocks, scales = copy_weight(weights(f"{name}_blocks"), device), copy_weight(exponents, device)
        matrices = zip(blocks, scales, strict=True)
        stored = [mxfp4_weight(_deinterleave(each, name), _deinterleave(scale, name)) for each, scale in matrices]
        if keep:
            return stack_packed([pack_weight(each) for each in stored])
        return torch.stack([each.dequantize().to(dtype) for each in stored])
    packed = copy_weight(weights(name), device)
    return torch.stack([_deinterleave(packed[e].T, name).to(dtype) for e in range(config.experts)])


def _deinterleave(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return the rows of one expert with gates before ups; other projections as they are."""
    return torch.cat([weight[::2], weight[1::2]]) if name.endswith("gate_up_proj") else weight
