"""Tiny models of random weights as GGUF files, converted as llama.cpp's `convert_hf_to_gguf.py` does it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from transformers import AutoConfig

from tests.engine.gguf_blocks import random_blocks
from tests.engine.models.tiny_models import SIZES, save

EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
# Architecture in GGUF files → (model_type, config).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "sliding_window": 12,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 20}),
    "qwen2moe": ("qwen2_moe", EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 80}),
    "qwen3moe": ("qwen3_moe", EXPERTS | {"num_experts": 4, "head_dim": 32, "norm_topk_prob": True}),
    "gpt-oss": (
        "gpt_oss",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
    "glm4": ("glm4", {"head_dim": 32, "attention_bias": True}),
    "starcoder2": ("starcoder2", {"sliding_window": 4096}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 4.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "cohere2": ("cohere2", {"logit_scale": 0.3, "sliding_window": 12}),
}
NATIVE = ("gemma", "gemma2", "gemma3", "phi3", "qwen3moe", "gpt-oss", "mixtral")  # on the native decoder
LLAMA_FAMILIES = ("mixtral", "granite")  # those of the converter's LlamaModel
# Changes with which rows are of whole Q4_K blocks.
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}
WIDE_EXPERTS = {
    "qwen3moe": {"moe_intermediate_size": 256},
    "qwen2moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256},
}

TinyGguf = Callable[[str], tuple[Path, Any]]
Quantize = Callable[[str, np.ndarray], tuple[np.ndarray, GGMLQuantizationType]]


def tiny_config(family: str, **changes: Any) -> Any:
    model_type, fields = FAMILIES[family]
    return AutoConfig.for_model(model_type, **(SIZES | fields | changes))


def save_gguf(folder: Path, family: str, quantize: Quantize | None = None, **changes: Any) -> tuple[Path, Any]:
    """Write a tiny model as a GGUF file. Return its path and transformers' instance of the model."""
    model = save(folder, tiny_config(family, **changes))
    return write_gguf(folder / "model.gguf", family, model, quantize), model


def save_wide_gguf(folder: Path, family: str, kind: str, experts: str = "") -> Path:
    """Write a model of random blocks of these types: of all matrices but those of experts, and of experts."""
    changes = WIDE | WIDE_EXPERTS.get(family, {})
    return save_gguf(folder, family, random_quantization(kind, experts or kind), **changes)[0]


def edit_gguf(
    path: Path, edit: Callable[[str], str | None], added: Mapping[str, np.ndarray] = MappingProxyType({})
) -> Path:
    """Copy a file with tensors renamed as `edit` says, None leaves one out, and with others."""
    reader, target = gguf.GGUFReader(path), path.with_name("edited.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        if (name := edit(tensor.name)) is not None:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, data in added.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error of the median row: rounding may route a few tokens to other experts."""
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).median())


def convert(family: str, name: str, tensor: torch.Tensor, config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a GGUF file that a parameter becomes, by the names that `gguf`'s map knows."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    if family in LLAMA_FAMILIES and (match := re.search(r"self_attn\.([qk])_proj\.(weight|bias)", name)):
        count = heads[match[1]]
        size = tensor.shape[0] // count
        return {name: tensor.view(count, 2, size // 2, -1).transpose(1, 2).reshape(tensor.shape)}
    if family.startswith("gemma") and name.endswith("norm.weight"):
        return {name: tensor + 1}
    if name.endswith("sinks"):
        return {f"{name}.weight": tensor}
    if name.endswith("shared_expert_gate.weight"):
        return {name: tensor.squeeze()}
    if match := re.fullmatch(r"(.+\.experts\.)(gate_up|down)_proj(_bias)?", name):
        kind = "bias" if match[3] else "weight"
        if family == "gpt-oss" and kind == "weight":
            tensor = tensor.transpose(1, 2)
        if match[2] == "down":
            return {f"{match[1]}down_proj.{kind}": tensor}
        gate, up = (tensor[:, ::2], tensor[:, 1::2]) if family == "gpt-oss" else tensor.chunk(2, dim=1)
        return {f"{match[1]}gate_proj.{kind}": gate, f"{match[1]}up_proj.{kind}": up}
    return {name: tensor}


def write_gguf(path: Path, family: str, model: Any, quantize: Quantize | None = None) -> Path:
    """Write a model of `transformers` as a GGUF file, in F32 or as `quantize` returns it by the name of a tensor."""
    config, architecture = model.config, "llama" if family == "mixtral" else family
    writer = gguf.GGUFWriter(path, architecture)
    add_metadata(writer, family, config)
    by_name = {text: each for each, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[architecture], config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for each, tensor in convert(family, name, parameter, config).items():
            stored = names.get_name(each, try_suffixes=(".weight", ".bias"))
            assert stored, each
            data, kind = np.ascontiguousarray(tensor.float().numpy()), GGMLQuantizationType.F32
            if quantize is not None and stored.endswith(".weight") and data.ndim > 1 and "ffn_gate_inp" not in stored:
                data, kind = quantize(stored, data)
            writer.add_tensor(stored, data, raw_dtype=kind)
    rope = config.rope_parameters
    for length in ("long", "short"):
        if f"{length}_factor" in rope:
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_metadata(writer: gguf.GGUFWriter, family: str, config: Any) -> None:
    rope = config.rope_parameters
    rope = rope.get("full_attention", rope)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(rope["rope_theta"])
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(getattr(config, "norm_epsilon", None) or config.layer_norm_eps)
    if family == "glm4":
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if original := rope.get("original_max_position_embeddings"):
        writer.add_rope_scaling_orig_ctx_len(original)
    if family in ("gemma2", "gemma3", "phi3", "gpt-oss", "cohere2"):
        writer.add_sliding_window(config.sliding_window or 0)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "granite":
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if family == "cohere2":
        writer.add_logit_scale(config.logit_scale)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if family in ("qwen2moe", "qwen3moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def q8_0(name: str, data: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    return quants.quantize(data, GGMLQuantizationType.Q8_0), GGMLQuantizationType.Q8_0


def random_quantization(kind: str, experts: str) -> Quantize:
    """Return a `quantize` that replaces weights by random blocks, for types that the `gguf` package only reads."""

    def quantize(name: str, data: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
        chosen = experts if "_exps" in name else kind
        rows, inputs = int(np.prod(data.shape[:-1])), data.shape[-1]
        seed = sum(name.encode())
        blocks = random_blocks(chosen, rows, inputs, seed=seed, scale=0.002).reshape(*data.shape[:-1], -1)
        return blocks, GGMLQuantizationType[chosen]

    return quantize
