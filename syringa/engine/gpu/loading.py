"""Load a native decoder's weights onto the GPU, tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable

import torch

from syringa.engine.cpu.layers.rotary import rotary_tables
from syringa.engine.gpu.decoder import GpuDecoder, GpuLayer, GpuLinear, GpuMlp
from syringa.engine.gpu.expert_loading import load_experts
from syringa.engine.gpu.ops.base import GpuOps, QKNormRope, choose_ops
from syringa.engine.gpu.packed_weight import concat_quantized, pack_fp8, pack_weight
from syringa.engine.loading.quantized import ReadQuantized
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.decoder import ReadWeight


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
        return weights(name).to(device).to(dtype)

    def in_fp32(name: str) -> torch.Tensor:
        return weights(name).to(device).float()

    def fused(prefix: str, names: tuple[str, ...], bias: bool) -> GpuLinear:
        offset = torch.cat([on_device(f"{prefix}{name}_proj.bias") for name in names]) if bias else None
        parts = [f"{prefix}{name}_proj.weight" for name in names]
        if quantized and (stored := concat_quantized([quantized(part, device) for part in parts])) is not None:
            return GpuLinear(pack_weight(stored), offset)
        weight = torch.cat([on_device(part) for part in parts])
        return GpuLinear(pack_fp8(weight) if fp8 else weight, offset)

    def load_mlp(prefix: str) -> GpuMlp:
        return GpuMlp(fused(prefix, ("gate", "up"), config.mlp_bias), fused(prefix, ("down",), config.mlp_bias))

    cosine, sine = (
        table.to(device) for table in rotary_tables(config.rope, config.rotary, length, config.max_positions)
    )
    embedding = on_device("model.embed_tokens.weight")
    head = embedding if config.tied else on_device("lm_head.weight")
    layers = []
    for i in range(config.layers):
        attention, mlp = f"model.layers.{i}.self_attn.", f"model.layers.{i}.mlp."
        norms = (in_fp32(attention + "q_norm.weight"), in_fp32(attention + "k_norm.weight")) if config.qk_norm else None
        layers.append(
            GpuLayer(
                input_norm=in_fp32(f"model.layers.{i}.input_layernorm.weight"),
                qkv=fused(attention, ("q", "k", "v"), config.qkv_bias),
                out=fused(attention, ("o",), config.out_bias),
                post_norm=in_fp32(f"model.layers.{i}.post_attention_layernorm.weight"),
                mlp=load_experts(config, weights, i, device, dtype, quantized) if config.sparse[i] else load_mlp(mlp),
                qk_norm_rope=QKNormRope((cosine, sine) if config.rotated[i] else None, norms, config.eps),
                window=config.windows[i],
                sinks=in_fp32(attention + "sinks") if config.sinks else None,
            )
        )
        if tick:
            tick()
    final = in_fp32("model.norm.weight")
    return GpuDecoder(config, ops or choose_ops(device), embedding, layers, final, head)
