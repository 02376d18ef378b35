"""The families of the native decoder as configs of tiny models: name → (model_type, fields)."""

from __future__ import annotations

from typing import Any

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [4.0 + i for i in range(6)],
    "partial_rotary_factor": 0.75,
}
FULL, SLIDING = "full_attention", "sliding_attention"
DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama scaled": ("llama", {"rope_parameters": LLAMA3}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "llama wide heads": ("llama", {"head_dim": 48, "num_key_value_heads": 1}),
    "llama odd heads": ("llama", {"head_dim": 24}),  # not a multiple of 16: PyTorch ops between the linear layers
    "llama no groups": ("llama", {"num_key_value_heads": 4}),
    "llama with an unused window": ("llama", {"sliding_window": 12}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral sliding": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2 sliding": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
    "qwen2 with an unused window": ("qwen2", {"use_sliding_window": False, "sliding_window": 12}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 biased": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 sliding": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 12, "layer_types": [FULL, SLIDING] * 2, "head_dim": 16},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "smollm3 biased": ("smollm3", {"attention_bias": True, "mlp_bias": True, "no_rope_layer_interval": 2}),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3 sliding": ("phi3", {"sliding_window": 20, "rope_parameters": dict(LONGROPE)}),
    # transformers takes the long factors for sequences of more than two tokens, and this engine for all.
    "phi3 long": ("phi3", {"rope_parameters": dict(LONGROPE), "original_max_position_embeddings": 2}),
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 32}
LOCAL_EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 32}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
GPT_OSS = LOCAL_EXPERTS | {"sliding_window": 12, "rope_parameters": GPT_OSS_YARN, "swiglu_limit": 0.5}
GLM4_MOE = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "head_dim": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "partial_rotary_factor": 0.5,
}
MOE: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("qwen3_moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen3_moe mixed": ("qwen3_moe", EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    # All layers, whatever max_window_layers says.
    "qwen3_moe sliding": (
        "qwen3_moe",
        EXPERTS | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
    ),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "mixtral sliding": ("mixtral", LOCAL_EXPERTS | {"sliding_window": 12}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "glm4_moe": ("glm4_moe", GLM4_MOE | {"use_qk_norm": True, "sliding_window": 12}),  # which it does not use
    "glm4_moe shared": (
        "glm4_moe",
        GLM4_MOE | {"n_shared_experts": 2, "norm_topk_prob": False, "attention_bias": True},
    ),
}

GEMMA3_ROPE = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
GEMMA: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 7,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "gemma3 capped": (
        "gemma3_text",
        {"head_dim": 16, "layer_types": [SLIDING, FULL] * 2, "sliding_window": 5, "final_logit_softcapping": 3.0},
    ),
}
