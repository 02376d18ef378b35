"""The architectures that run from GGUF files, by `general.architecture`, and what llama.cpp's converter does to each.

Adding one that the native decoder runs or `transformers` defines takes an entry here, if `gguf.get_tensor_name_map`
knows its tensors, and a small model in `tests/engine/models/gguf_models.py`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

# Experts in the parameters of transformers' definitions. A GGUF file has a tensor for the gates, one for the ups and
# one for the downs of all experts of a layer, outputs × inputs.
#   stacked: gates before ups, outputs × inputs
#   interleaved: a gate and its up next to each other, inputs × outputs
Experts = Literal["none", "stacked", "interleaved"]


class GgufArchitecture(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture. Config fields are those of `config.json`; metadata keys are without the prefix."""

    model_class: str
    model_type: str
    llama_like: bool = False  # its config has no other fields than those of Llama and its likes
    fields: dict[str, str] = {}  # config field → metadata key of a positive number that must be there
    optional_fields: dict[str, str] = {}  # the same, of a number that may be missing
    flags: dict[str, str] = {}  # config field → tensor that is there if the field is true
    constants: dict[str, Any] = {}  # config fields that GGUF files do not have
    epsilon: str = "rms_norm_eps"  # config field; others than this one are those of LayerNorm
    interleaved_rope: bool = False  # rows of q and k are in pairs for the rotary embedding, not in halves as here
    experts: Experts = "none"
    delta_nets: bool = False  # it has layers of linear attention
    windowed: bool = False  # attention has a sliding window, if the file states its size
    full_attention_every: int = 0  # layers without the window; 0: all have it
    wide_query_layers: int = 0  # queries are scaled by the head size, or by hidden ÷ heads with this many layers
    local_rope_theta: float = 0.0  # of layers with a window, unless the file says; 0: the same as of the others
    rope_constants: dict[str, Any] = {}  # rotary parameters that GGUF files do not have, for scaled frequencies


_MOE_FIELDS = {"num_experts_per_tok": "expert_used_count"}
_ATTENTION_BIAS = {"attention_bias": "blk.0.attn_q.bias"}

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        model_class="LlamaForCausalLM", model_type="llama", llama_like=True, interleaved_rope=True
    ),
    "mistral": GgufArchitecture(model_class="MistralForCausalLM", model_type="mistral", llama_like=True),
    "qwen2": GgufArchitecture(model_class="Qwen2ForCausalLM", model_type="qwen2", llama_like=True),
    "qwen3": GgufArchitecture(model_class="Qwen3ForCausalLM", model_type="qwen3", llama_like=True),
    "smollm3": GgufArchitecture(
        model_class="SmolLM3ForCausalLM",
        model_type="smollm3",
        llama_like=True,
        interleaved_rope=True,
    ),
    "gemma": GgufArchitecture(model_class="GemmaForCausalLM", model_type="gemma"),
    "gemma2": GgufArchitecture(
        model_class="Gemma2ForCausalLM",
        model_type="gemma2",
        fields={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        windowed=True,
        full_attention_every=2,
        wide_query_layers=46,  # 27B
    ),
    "gemma3": GgufArchitecture(
        model_class="Gemma3ForCausalLM",
        model_type="gemma3_text",
        optional_fields={"final_logit_softcapping": "final_logit_softcapping"},
        windowed=True,
        full_attention_every=6,
        wide_query_layers=62,  # 27B
        local_rope_theta=10000.0,
    ),
    "phi3": GgufArchitecture(model_class="Phi3ForCausalLM", model_type="phi3", windowed=True),
    "qwen2moe": GgufArchitecture(
        model_class="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        fields={
            **_MOE_FIELDS,
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        flags={"qkv_bias": "blk.0.attn_q.bias"},
        constants={"norm_topk_prob": False},
        experts="stacked",
    ),
    "qwen3moe": GgufArchitecture(
        model_class="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        fields={
            **_MOE_FIELDS,
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        flags=_ATTENTION_BIAS,
        constants={"norm_topk_prob": True},
        experts="stacked",
    ),
    "qwen35": GgufArchitecture(
        model_class="Qwen3_5ForCausalLM",
        model_type="qwen3_5_text",
        flags=_ATTENTION_BIAS,
        delta_nets=True,
    ),
    "qwen35moe": GgufArchitecture(
        model_class="Qwen3_5MoeForCausalLM",
        model_type="qwen3_5_moe_text",
        fields={
            **_MOE_FIELDS,
            "num_experts": "expert_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        },
        flags=_ATTENTION_BIAS,
        experts="stacked",
        delta_nets=True,
    ),
    "gpt-oss": GgufArchitecture(
        model_class="GptOssForCausalLM",
        model_type="gpt_oss",
        fields={
            **_MOE_FIELDS,
            "num_local_experts": "expert_count",
            "intermediate_size": "expert_feed_forward_length",
        },
        flags=_ATTENTION_BIAS,
        experts="interleaved",
        windowed=True,
        full_attention_every=2,
        rope_constants={"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    ),
    "glm4": GgufArchitecture(model_class="Glm4ForCausalLM", model_type="glm4", flags=_ATTENTION_BIAS),
    "starcoder2": GgufArchitecture(
        model_class="Starcoder2ForCausalLM",
        model_type="starcoder2",
        flags={"use_bias": "blk.0.attn_q.bias"},
        constants={"sliding_window": 4096},  # of all three sizes
        epsilon="norm_epsilon",
    ),
    "olmo2": GgufArchitecture(model_class="Olmo2ForCausalLM", model_type="olmo2"),
    "granite": GgufArchitecture(
        model_class="GraniteForCausalLM",
        model_type="granite",
        fields={
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "attention_multiplier": "attention.scale",
            "logits_scaling": "logit_scale",
        },
        flags={**_ATTENTION_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
        interleaved_rope=True,
    ),
    "cohere2": GgufArchitecture(
        model_class="Cohere2ForCausalLM",
        model_type="cohere2",
        fields={"logit_scale": "logit_scale"},
        flags=_ATTENTION_BIAS,
        epsilon="layer_norm_eps",
        windowed=True,
        full_attention_every=4,
    ),
}

# Mixtral is "llama" with experts.
MIXTRAL = GgufArchitecture(
    model_class="MixtralForCausalLM",
    model_type="mixtral",
    fields={**_MOE_FIELDS, "num_local_experts": "expert_count"},
    interleaved_rope=True,
    experts="stacked",
    windowed=True,
)

# Mistral with a sliding window is "llama", too; Llama itself has none.
WINDOWED_LLAMA = GgufArchitecture(
    model_class="MistralForCausalLM", model_type="mistral", llama_like=True, interleaved_rope=True
)


def find_architecture(metadata: dict[str, Any]) -> GgufArchitecture | None:
    """Return the architecture of a file with this metadata; None if it does not run from GGUF."""
    name = metadata.get("general.architecture")
    if name == "llama" and metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "llama" and metadata.get("llama.attention.sliding_window"):
        return WINDOWED_LLAMA
    return ARCHITECTURES.get(name) if isinstance(name, str) else None
