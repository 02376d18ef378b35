"""Tiny hybrid models with random weights, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.engine.models.tiny_models import PROMPTS, SIZES, save_tokenizer

LINEAR, FULL = "linear_attention", "full_attention"
DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", EXPERTS | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
    # Sizes that are no multiples of a vector, equal numbers of heads, another kernel.
    "qwen3_next odd": (
        "qwen3_next",
        EXPERTS
        | {
            "norm_topk_prob": False,
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 3,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "head_dim": 24,
        },
    ),
    "qwen3_5": ("qwen3_5_text", {"tie_word_embeddings": True}),
    "qwen3_5_moe": ("qwen3_5_moe_text", EXPERTS | {"layer_types": [FULL, LINEAR, LINEAR, LINEAR]}),
}
LONG_PROMPTS = [*PROMPTS, [(5 * i * i + i) % 150 + 5 for i in range(150)]]  # more than two chunks of the delta rule


def make_config(name: str, **others: Any) -> Any:
    from transformers import AutoConfig

    family, changes = HYBRIDS[name]
    return AutoConfig.for_model(family, **(SIZES | DELTA_NET | changes | others))


def save_hybrid(folder: Path, config: Any, model_class: Any = None) -> Any:
    """Save a model of this config. Return it as loaded by transformers, in fp32 with eager attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    factory = model_class or AutoModelForCausalLM
    model = (
        factory._from_config(config, attn_implementation="eager", dtype=torch.float32)
        if model_class
        else factory.from_config(config, attn_implementation="eager", dtype=torch.float32)
    ).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # decays between almost none and e^-4
            parameter.data = torch.linspace(-4, 1.5, parameter.numel())
        elif "conv1d" in name:
            parameter.data = torch.randn_like(parameter)
        else:
            wide = parameter.dim() > 1
            scale = 0.08 if wide else 0.1
            parameter.data = torch.randn_like(parameter) * scale + (0 if wide else parameter.data)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model
