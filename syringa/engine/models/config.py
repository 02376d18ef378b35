"""Configuration of the native decoder, read from a Hugging Face config. Model families differ only by these flags."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from syringa.errors import ModelError

NATIVE_TYPES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
GPU_NATIVE_TYPES = (*NATIVE_TYPES, "qwen3_moe")  # mixture-of-experts models run natively on a GPU only


@dataclass(frozen=True)
class DecoderConfig:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocab: int
    eps: float
    max_positions: int
    rope: dict[str, Any]  # rope_type, rope_theta and the parameters of that type
    rotary: int  # components of a head that are rotated
    tied: bool  # the output head shares the embedding's weights
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...] = field(default=())  # sliding window per layer; 0: unlimited
    rotated: tuple[bool, ...] = field(
        default=()
    )  # whether rotary embedding applies, per layer; not to every fourth layer of SmolLM3
    experts: int = 0  # per sparse layer; 0: a dense model
    experts_per_token: int = 0
    expert_intermediate: int = 0
    normalize_experts: bool = True  # the weights of a token's experts add up to 1
    sparse: tuple[bool, ...] = field(default=())  # whether a layer has experts instead of an MLP


def is_native(config: dict[str, Any], device: str = "cpu") -> bool:
    """Return whether the native decoder supports this model on a device (cpu or cuda)."""
    types = GPU_NATIVE_TYPES if device == "cuda" else NATIVE_TYPES
    return config.get("model_type") in types and config.get("hidden_act", "silu") == "silu"


def read_config(config: dict[str, Any]) -> DecoderConfig:
    """Read a Hugging Face config. Raise `ModelError` naming what is missing or impossible."""
    kind = config["model_type"]
    try:
        heads, hidden, layers = config["num_attention_heads"], config["hidden_size"], config["num_hidden_layers"]
        head_size = config.get("head_dim") or hidden // heads
        rope = rope_parameters(config)
        decoder = DecoderConfig(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_size=head_size,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
            eps=config.get("rms_norm_eps", 1e-6),
            max_positions=config.get("max_position_embeddings", 2048),
            rope=rope,
            rotary=int(head_size * rope.get("partial_rotary_factor", 1.0)),
            tied=bool(config.get("tie_word_embeddings", kind == "smollm3")),
            qkv_bias=kind == "qwen2" or bool(config.get("attention_bias", False)),
            out_bias=kind != "qwen2" and bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            windows=_windows(config, kind, layers),
            rotated=_rotated(config, kind, layers),
            **(_experts(config, layers) if kind == "qwen3_moe" else {"sparse": (False,) * layers}),
        )
    except KeyError as missing:
        raise ModelError(f"config.json has no {missing.args[0]!r}: the model is incomplete") from None
    if decoder.heads % decoder.kv_heads:
        raise ModelError(f"{decoder.heads} attention heads cannot share {decoder.kv_heads} key-value heads")
    return decoder


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters from either layout of the config."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.pop("type", "default"))
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if original := config.get("original_max_position_embeddings"):
        rope.setdefault("original_max_position_embeddings", original)
    return rope


def _windows(config: dict[str, Any], kind: str, layers: int) -> tuple[int, ...]:
    window = config.get("sliding_window") or 0
    if kind in ("qwen2", "qwen3", "qwen3_moe", "smollm3") and not config.get("use_sliding_window", False):
        window = 0
    if types := config.get("layer_types"):
        return tuple(window if each == "sliding_attention" else 0 for each in types)
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        first = config.get("max_window_layers", 28)
        return tuple(window if i >= first else 0 for i in range(layers))
    return (window,) * layers


def _experts(config: dict[str, Any], layers: int) -> dict[str, Any]:
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    return {
        "experts": config.get("num_local_experts") or config["num_experts"],  # the former since transformers 5
        "experts_per_token": config["num_experts_per_tok"],
        "expert_intermediate": config["moe_intermediate_size"],
        "normalize_experts": bool(config.get("norm_topk_prob", False)),
        "sparse": tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    }


def _rotated(config: dict[str, Any], kind: str, layers: int) -> tuple[bool, ...]:
    if flags := config.get("no_rope_layers"):  # 1 means rotated, despite the name
        return tuple(map(bool, flags))
    interval = config.get("no_rope_layer_interval", 4) if kind == "smollm3" else 0
    return tuple(not interval or (i + 1) % interval != 0 for i in range(layers))
