"""The models of the GPU benchmarks: real shapes, and random weights that are created on the GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from syringa.engine.gpu.ops.base import choose_ops
from syringa.engine.loading.gpu_model import load_native_on_gpu
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.loading.quantized import FP8_DTYPE, QuantizedWeight
from syringa.engine.models.config import DecoderConfig, read_config
from syringa.modelfiles import ModelDescription

LENGTH = 4096  # maximum context in the benchmarks
QWEN3_CONFIG = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_CONFIG
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": QWEN3_CONFIG
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12_288,
        "tie_word_embeddings": False,
    },
}
MODELS["qwen3-30b-a3b"] = QWEN3_CONFIG | {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "intermediate_size": 6144,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}
MODELS["gpt-oss-20b"] = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201_088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
MODELS["mixtral-8x7b"] = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
}
MODELS["glm-4.5-air"] = {  # 107 GB in FP8; bf16 does not fit one GPU
    "model_type": "glm4_moe",
    "hidden_size": 4096,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 10_944,
    "vocab_size": 151_552,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
}
HYBRID_CONFIG = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "vocab_size": 248_320,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "rope_theta": 10_000_000.0,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
MODELS["qwen3.5-9b"] = HYBRID_CONFIG | {
    "model_type": "qwen3_5_text",
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
MODELS["qwen3.5-35b-a3b"] = HYBRID_CONFIG | {  # Qwen3-Next with half the experts: 70 GB in bf16
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


class RandomWeights:
    """Random weights by name, created on the device."""

    def __init__(self, config: DecoderConfig, device: torch.device) -> None:
        c = config
        self.generator = torch.Generator(device=device).manual_seed(0)
        self.device = device
        self.shapes = {
            "q_proj": (c.heads * c.head_size, c.hidden),
            "k_proj": (c.kv_heads * c.head_size, c.hidden),
            "v_proj": (c.kv_heads * c.head_size, c.hidden),
            "o_proj": (c.hidden, c.heads * c.head_size),
            "gate_proj": (c.intermediate, c.hidden),
            "up_proj": (c.intermediate, c.hidden),
            "down_proj": (c.hidden, c.intermediate),
            "embed_tokens": (c.vocab, c.hidden),
            "lm_head": (c.vocab, c.hidden),
        }
        gate, up, down = c.expert_names.projections
        self.expert_shapes = {
            gate: (c.expert_intermediate, c.hidden),
            up: (c.expert_intermediate, c.hidden),
            down: (c.hidden, c.expert_intermediate),
        }
        # gpt-oss has all experts of a layer in one tensor, inputs × outputs, beside their biases and a logit per head.
        self.packed_shapes = {
            "gate_up_proj": (c.experts, c.hidden, 2 * c.expert_intermediate),
            "down_proj": (c.experts, c.expert_intermediate, c.hidden),
        }
        self.vectors = {
            "gate_up_proj_bias": (c.experts, 2 * c.expert_intermediate),
            "down_proj_bias": (c.experts, c.hidden),
            "sinks": (c.heads,),
        }
        self.router, self.router_shape = c.expert_names.router, (c.experts, c.hidden)
        self.shapes["g_proj"] = self.shapes["q_proj"]
        self.shared_shapes = {
            "gate_proj": (c.shared_intermediate, c.hidden),
            "up_proj": (c.shared_intermediate, c.hidden),
            "down_proj": (c.hidden, c.shared_intermediate),
        }
        self.delta_net = c.delta_net
        self.sizes = {"q_norm": c.head_size, "k_norm": c.head_size}
        self.hidden = c.hidden

    def quantized(self, name: str, device: torch.device, dtype: str) -> QuantizedWeight | None:
        """Return random weights as a quantized checkpoint has them: fp8 (one scale per output), fp8-block or int4."""
        kind = name.split(".")[-2]
        if ".linear_attn." in name or ".shared_expert" in name.replace(".shared_experts.", "."):
            return None  # stays in bf16
        shapes = self._expert_or_dense(name)
        if kind not in shapes or kind in ("embed_tokens", "lm_head") or dtype == "mxfp4":
            return None
        outputs, inputs = shapes[kind]
        group = inputs if dtype == "fp8" else 128
        scales = torch.rand(outputs, -(-inputs // group), device=device, generator=self.generator) + 0.5
        if dtype == "fp8-block":
            scales = scales[::128].repeat_interleave(128, 0)[:outputs]
        if dtype == "int4":
            codes = torch.randint(
                0, 16, (outputs, inputs), device=device, dtype=torch.uint8, generator=self.generator
            )  # fmt: skip
            return QuantizedWeight("int4", codes, (scales * 0.2 * inputs**-0.5).half(), group)
        data = torch.randn(outputs, inputs, device=device, generator=self.generator).to(FP8_DTYPE)
        return QuantizedWeight("fp8", data, scales * inputs**-0.5, group)

    def __call__(self, name: str) -> torch.Tensor:
        kind, last = name.split(".")[-2:]
        if ".linear_attn." in name:
            return self._delta_net_tensor(name.split(".linear_attn.")[1])
        if kind == "shared_expert_gate":
            return self._matrix((1, self.hidden), self.hidden)
        if ".shared_expert." in name:
            return self._matrix(self.shared_shapes[kind], self.shared_shapes[kind][1])
        if last.endswith(("_proj_blocks", "_proj_scales")):
            experts, inputs, outputs = self.packed_shapes[last.rsplit("_", 1)[0]]
            blocks = last.endswith("_blocks")
            size = (experts, outputs, inputs // 32, 16) if blocks else (experts, outputs, inputs // 32)
            low, high = (0, 256) if blocks else (119, 122)
            return torch.randint(low, high, size, device=self.device, dtype=torch.uint8, generator=self.generator)
        if last in self.vectors:
            return 0.1 * torch.randn(self.vectors[last], device=self.device, generator=self.generator)
        if last in self.packed_shapes:
            return self._matrix(self.packed_shapes[last], self.packed_shapes[last][1])
        if last == "e_score_correction_bias":
            return 0.01 * torch.randn(self.router_shape[0], device=self.device, generator=self.generator)
        if name.endswith(f"{self.router}.weight"):
            return self._matrix(self.router_shape, self.router_shape[1])
        if name.endswith(f"{self.router}.bias"):
            return 0.1 * torch.randn(self.router_shape[0], device=self.device, generator=self.generator)
        if "experts." in name:
            shape = self._expert_or_dense(name)[kind]
            return self._matrix(shape, shape[1])
        if name.endswith("bias") or kind not in self.shapes:
            size = self.shapes[kind][0] if kind in self.shapes else self.sizes.get(kind, self.hidden)
            middle = 0.0 if name.endswith("bias") else 1.0
            noise = torch.randn(size, device=self.device, generator=self.generator)
            return middle + 0.1 * noise
        return self._matrix(self.shapes[kind], self.shapes[kind][1])

    def _delta_net_tensor(self, name: str) -> torch.Tensor:
        assert self.delta_net is not None
        net, hidden = self.delta_net, self.hidden
        shapes = {
            "qkv_proj.weight": (net.channels, hidden),
            "z_proj.weight": (net.value_width, hidden),
            "b_proj.weight": (net.value_heads, hidden),
            "a_proj.weight": (net.value_heads, hidden),
            "out_proj.weight": (hidden, net.value_width),
            "conv1d.weight": (net.channels, 1, net.kernel),
        }
        if name in shapes:
            return self._matrix(shapes[name], shapes[name][-1])
        if name == "A_log":
            return torch.linspace(-4, 2.5, net.value_heads, device=self.device)
        length = net.value_size if name == "norm.weight" else net.value_heads
        return 1 + 0.1 * torch.randn(length, device=self.device, generator=self.generator)

    def _expert_or_dense(self, name: str) -> dict[str, tuple[int, int]]:
        """Return the shapes of the module that a tensor belongs to. Models with shared experts have one of them."""
        return self.expert_shapes if ".experts." in name or ".shared_experts." in name else self.shapes

    def _matrix(self, shape: tuple[int, ...], inputs: int) -> torch.Tensor:
        weight = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return weight.normal_(0, inputs**-0.5, generator=self.generator)


def build_model(
    name: str,
    device: torch.device,
    dtype: str = "bf16",
    length: int = LENGTH,
    attention: str = "auto",
    deterministic: bool = False,
    **changes: Any,
) -> LoadedModel:
    """Build a model. `dtype`: bf16, fp8, or as in a quantized checkpoint fp8-block, int4 or mxfp4 (experts only)."""
    settings = MODELS[name] | changes
    if dtype == "mxfp4":
        settings |= {"quantization_config": {"quant_method": "mxfp4"}}
    config = read_config(settings)
    description = ModelDescription(
        name=name, architecture="Qwen3ForCausalLM", config=settings, max_model_len=length, end_tokens=frozenset()
    )
    weights = RandomWeights(config, device)
    ops = choose_ops(device, attention, deterministic=deterministic)
    quantized = None
    if dtype in ("fp8-block", "int4", "mxfp4") or (dtype == "fp8" and config.experts):

        def quantized(name: str, device: torch.device) -> QuantizedWeight | None:
            return weights.quantized(name, device, dtype)

    precision = "fp8" if dtype == "fp8-block" else dtype
    return load_native_on_gpu(
        config, description, weights, device, precision, length, time.perf_counter(), ops=ops, quantized=quantized
    )
