"""Read the experts of a layer from the layouts of checkpoints into that of the kernels: outputs × inputs, gates first.

Qwen3-MoE and Mixtral have three matrices per expert. gpt-oss has two tensors for all experts of a layer, with gates and
ups interleaved: in bf16 as inputs × outputs, or in MXFP4 as outputs × inputs.
"""

from __future__ import annotations

import torch

from syringa.engine.gpu.decoder import GpuExperts, GpuLinear
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.decoder import ReadWeight

# The values of e2m1 by their four bits: sign, two bits of exponent, one of mantissa.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
E8M0_BIAS = 127


def load_experts(
    config: DecoderConfig, weights: ReadWeight, layer: int, device: torch.device, dtype: torch.dtype
) -> GpuExperts:
    """Load the router and the experts of a layer, one tensor at a time on the host."""
    prefix, names = f"model.layers.{layer}.", config.expert_names
    size = config.expert_intermediate
    gate_up = torch.empty(config.experts, 2 * size, config.hidden, dtype=dtype, device=device)
    down = torch.empty(config.experts, config.hidden, size, dtype=dtype, device=device)

    def on_device(name: str) -> torch.Tensor:
        return weights(prefix + name).to(device).to(dtype)

    if not config.packed_experts:
        for e in range(config.experts):
            gate, up, out = (f"{prefix}{names.experts}.{e}.{each}.weight" for each in names.projections)
            gate_up[e, :size] = weights(gate).to(device)
            gate_up[e, size:] = weights(up).to(device)
            down[e] = weights(out).to(device)
        router = GpuLinear(on_device(f"{names.router}.weight"))
        return GpuExperts(router, gate_up, down, config.experts_per_token, config.normalize_experts)
    for name, target in (("gate_up_proj", gate_up), ("down_proj", down)):
        tensors = f"{prefix}{names.experts}.{name}"
        if config.mxfp4:
            blocks, scales = weights(f"{tensors}_blocks").to(device), weights(f"{tensors}_scales").to(device)
            for e in range(config.experts):
                target[e] = _deinterleave(dequantize_mxfp4(blocks[e], scales[e]), name)
        else:
            packed = weights(tensors).to(device)
            for e in range(config.experts):
                target[e] = _deinterleave(packed[e].T, name)
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


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return MXFP4 weights in fp32, `[rows, 32 · groups]`.

    `blocks`: `[rows, groups, 16]`, uint8, two e2m1 numbers per byte, the low four bits first. `scales`: `[rows,
    groups]`, uint8, the exponent of two of each group of 32 numbers plus 127.
    """
    table = torch.tensor(E2M1_VALUES, device=blocks.device)
    values = table[torch.stack([blocks & 15, blocks >> 4], dim=-1).int()].flatten(2)
    return torch.ldexp(values, scales.int()[..., None] - E8M0_BIAS).flatten(1)


def _deinterleave(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return the rows of one expert with gates before ups; other projections as they are."""
    return torch.cat([weight[::2], weight[1::2]]) if name == "gate_up_proj" else weight
