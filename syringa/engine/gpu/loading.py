"""Load a native decoder's weights onto the GPU, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.gpu.decoder import GpuDecoder, GpuExperts, GpuLayer, GpuLinear, GpuMlp
from syringa.engine.gpu.delta_net_rows import DeltaNet
from syringa.engine.gpu.expert_loading import load_experts
from syringa.engine.gpu.ops.base import GpuOps, QKNormRope, choose_ops
from syringa.engine.gpu.packed_weight import PackedWeight, concat_quantized, pack_fp8, pack_weight
from syringa.engine.loading.device_copy import copy_weight
from syringa.engine.loading.quantized import ReadQuantized
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.delta_rule import read_delta_net_parameters, tiled_order
from syringa.engine.models.layers import ReadWeight


def load_gpu_decoder(
    config: DecoderConfig,
    weights: ReadWeight,
    device: torch.device,
    length: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    fp8: bool = False,
    quantized: ReadQuantized | None = None,
    ops: GpuOps | None = None,
    tick: Callable[[], None] | None = None,
) -> GpuDecoder:
    """Load a decoder with at most one tensor at a time on the host.

    With `fp8`, all linear layers but the output head are quantized. `quantized` returns weights that stay as they are
    stored. `tick` is called after each layer.
    """

    def on_device(name: str) -> torch.Tensor:
        # Converted on the device, which is faster; the file's dtype is often smaller to transfer, too.
        return copy_weight(weights(name), device).to(dtype)

    def in_fp32(name: str) -> torch.Tensor:
        return copy_weight(weights(name), device).float()

    def fused(prefix: str, names: tuple[str, ...], bias: bool) -> GpuLinear:
        offset = torch.cat([on_device(f"{prefix}{name}_proj.bias") for name in names]) if bias else None
        parts = [f"{prefix}{name}_proj.weight" for name in names]
        if quantized and (stored := concat_quantized([quantized(part, device) for part in parts])) is not None:
            return GpuLinear(pack_weight(stored), offset)
        weight = torch.cat([on_device(part) for part in parts])
        return GpuLinear(pack_fp8(weight) if fp8 else weight, offset)

    def delta_net_inputs(prefix: str) -> tuple[GpuLinear, GpuLinear | None]:
        """Load the input projection, as one, or with b and a apart if only the others are quantized."""
        if quantized and quantized(f"{prefix}b_proj.weight", device) is None:
            joined = fused(prefix, ("qkv", "z"), False)
            if isinstance(joined.weight, PackedWeight):
                return joined, fused(prefix, ("b", "a"), False)
        return fused(prefix, ("qkv", "z", "b", "a"), False), None

    def delta_net_output(prefix: str) -> GpuLinear:
        assert config.delta_net is not None
        if not config.tiled_values:
            return fused(prefix, ("out",), False)
        stored = on_device(f"{prefix}out_proj.weight")
        weight = torch.empty_like(stored)
        weight[:, tiled_order(config.delta_net).to(device)] = stored
        return GpuLinear(pack_fp8(weight) if fp8 else weight)

    def load_mlp(prefix: str) -> GpuMlp:
        return GpuMlp(fused(prefix, ("gate", "up"), config.mlp_bias), fused(prefix, ("down",), config.mlp_bias))

    def load_sparse(layer: int) -> GpuExperts:
        experts = load_experts(config, weights, layer, device, dtype, quantized, fp8=fp8)
        shared = f"model.layers.{layer}.{config.expert_names.shared}"
        if config.shared_intermediate:
            experts.shared_mlp, experts.shared_gate = load_mlp(f"{shared}."), on_device(f"{shared}_gate.weight")
        elif config.shared_experts != experts.shared:
            experts.shared_mlp = load_mlp(f"{shared}.")
        return experts

    def load_delta_net(prefix: str) -> DeltaNet:
        assert config.delta_net is not None
        parameters = read_delta_net_parameters(prefix, in_fp32)
        return DeltaNet(parameters, config.delta_net, config.eps)

    def load_rotary(rope: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = rotary_tables(rope, config.rotary, length, config.max_positions)
        return cosine.to(device), sine.to(device)

    def load_norm(prefix: str, name: str) -> torch.Tensor | None:
        return in_fp32(f"{prefix}{name}.weight") if name else None

    rotary = load_rotary(config.rope)
    local_rotary = load_rotary(config.local_rope) if config.local_rope is not None else rotary
    names = config.norm_names
    embedding = on_device("model.embed_tokens.weight")
    head = embedding if config.tied else on_device("lm_head.weight")
    layers = []
    for i in range(config.layers):
        prefix = f"model.layers.{i}."
        attention, linear = f"{prefix}self_attn.", config.is_linear(i)
        norms = None
        if config.qk_norm and not linear:
            norms = in_fp32(attention + "q_norm.weight"), in_fp32(attention + "k_norm.weight")
        projections = ("q", "k", "v", "g") if config.output_gate else ("q", "k", "v")
        gates = None
        if linear:
            qkv, gates = delta_net_inputs(f"{prefix}linear_attn.")
            out = delta_net_output(f"{prefix}linear_attn.")
        else:
            qkv = fused(attention, projections, config.qkv_bias)
            out = fused(attention, ("o",), config.out_bias)
        tables = rotary if config.rope_of(i) is config.rope else local_rotary
        layers.append(
            GpuLayer(
                input_norm=in_fp32(f"{prefix}{names.attention}.weight"),
                qkv=qkv,
                out=out,
                post_norm=in_fp32(f"{prefix}{names.mlp}.weight"),
                mlp=load_sparse(i) if config.sparse[i] else load_mlp(f"{prefix}mlp."),
                qk_norm_rope=QKNormRope(tables if config.rotated[i] else None, norms, config.eps),
                window=config.windows[i],
                out_norm=load_norm(prefix, names.attention_output),
                mlp_norm=load_norm(prefix, names.mlp_output),
                sinks=in_fp32(attention + "sinks") if config.sinks else None,
                delta_net=load_delta_net(f"{prefix}linear_attn.") if linear else None,
                gates=gates,
            )
        )
        if tick:
            tick()
    final = in_fp32("model.norm.weight")
    return GpuDecoder(config, ops or choose_ops(device), embedding, layers, final, head)
