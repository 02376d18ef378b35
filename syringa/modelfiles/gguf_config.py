"""Translation of GGUF metadata to a Hugging Face `config.json`, so that the engine handles one format only."""

from __future__ import annotations

from typing import Any

from syringa.errors import ModelError
from syringa.modelfiles.gguf import GgufFile

# general.architecture → (class, model_type)
ARCHITECTURES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "smollm3": ("SmolLM3ForCausalLM", "smollm3"),
}

# Rotary scaling of Llama 3.1 and later. GGUF stores only the resulting factor of each frequency.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192

_MAX_LAYERS = 4096


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the model's config in the format of Hugging Face."""
    reader = _GgufMetadata(file)
    architecture, model_type = reader.architecture()
    hidden = reader.integer("embedding_length")
    heads = reader.integer("attention.head_count")
    if heads == 0 or (hidden % heads and reader.get("attention.key_length") is None):
        raise reader.wrong("attention.head_count", heads)
    head_dim = reader.integer("attention.key_length", hidden // heads)
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different lengths are not supported")
    if reader.integer("expert_count", 0):
        raise ModelError(f"{file.path}: mixture-of-experts models are not supported from GGUF; use the model's folder")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": _layers(reader),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "intermediate_size": reader.integer("feed_forward_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.number("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(reader),
        "vocab_size": _vocab_size(reader),
        "max_position_embeddings": reader.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors or model_type == "qwen2",
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
        "hidden_act": "silu",
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "sliding_window": reader.integer("attention.sliding_window", 0) or None,
    }
    rotated = reader.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if model_type == "smollm3":
        # Every fourth layer has no rotary embedding. GGUF does not store this: it is part of the architecture.
        config["no_rope_layer_interval"] = 4
        config["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return config


class _GgufMetadata:
    """Typed access to metadata keys with the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture", ""))

    def architecture(self) -> tuple[str, str]:
        if not self.prefix:
            raise ModelError(f"{self.file.path} does not name its architecture (general.architecture)")
        if self.prefix not in ARCHITECTURES:
            raise ModelError(
                f"{self.file.path}: the architecture {self.prefix!r} does not run from GGUF; "
                f"these do: {', '.join(ARCHITECTURES)}"
            )
        return ARCHITECTURES[self.prefix]

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one value per layer
        if value is None:
            value = default
        if not isinstance(value, int) or value < 0:
            raise self.wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self.wrong(key, value)
        return float(value)

    def wrong(self, key: str, value: Any) -> ModelError:
        state = "missing" if value is None else f"{value!r}"
        return ModelError(f"{self.file.path}: {self.prefix}.{key} is {state}; convert the model again")


def _layers(reader: _GgufMetadata) -> int:
    """Return the number of layers. Refuse implausible ones, which would allocate memory layer by layer."""
    count = reader.integer("block_count")
    if count > _MAX_LAYERS:
        raise reader.wrong("block_count", count)
    return count


def _vocab_size(reader: _GgufMetadata) -> int:
    embedding = reader.file.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[1]
    return reader.integer("vocab_size")


def _rope_scaling(reader: _GgufMetadata) -> dict[str, Any] | None:
    kind = reader.get("rope.scaling.type")
    if "rope_freqs.weight" in reader.file.tensors:
        return _llama3_scaling(reader.file.floats("rope_freqs.weight"))
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{reader.file.path}: rope scaling of the type {kind!r} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": reader.number("rope.scaling.factor", 1.0)}
    if original := reader.integer("rope.scaling.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for name, gguf_name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if reader.get(f"rope.scaling.{gguf_name}") is not None:
                scaling[name] = reader.number(f"rope.scaling.{gguf_name}")
    return scaling


def _llama3_scaling(factors: list[float]) -> dict[str, Any] | None:
    factor = max(factors, default=1.0)
    if factor == 1.0:
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
        "freq_factors": factors,  # from the file; the rest is derived
    }
