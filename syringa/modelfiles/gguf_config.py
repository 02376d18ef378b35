"""Translation of GGUF metadata to a Hugging Face `config.json`, so that the engine handles one format only."""

from __future__ import annotations

import math
import re
from typing import Any

from syringa.errors import ModelError
from syringa.modelfiles.gguf import GgufFile, quoted
from syringa.modelfiles.gguf_architectures import ARCHITECTURES, GgufArchitecture, find_architecture

_MAX_LAYERS = 4096
_MAX_INTEGER = 2**31 - 1
_NO_TOKEN = 2**32 - 1  # llama.cpp's -1 for a token that a model does not have
_LAYER_TENSOR = re.compile(r"blk\.([0-9]{1,9})\.")


def check_architecture(metadata: dict[str, Any], source: str) -> GgufArchitecture:
    """Return the architecture of a file with this metadata. Raise `ModelError`, which names `source`, for others."""
    name = str(metadata.get("general.architecture", ""))
    if not name:
        raise ModelError(f"{source} does not name its architecture (general.architecture)")
    found = find_architecture(metadata)
    if found is None:
        raise ModelError(
            f"{source}: the architecture {quoted(name)} does not run from GGUF; these do: {', '.join(ARCHITECTURES)}"
        )
    return found


def config_from_gguf(file: GgufFile) -> dict[str, Any]:
    """Return the model's config in the format of Hugging Face."""
    reader = _GgufMetadata(file)
    architecture = check_architecture(file.metadata, file.path)
    hidden = reader.integer("embedding_length")
    heads = reader.integer("attention.head_count")
    if hidden % heads and reader.get("attention.key_length") is None:
        raise reader.wrong("attention.head_count", heads)
    head_dim = reader.integer("attention.key_length", hidden // heads)
    if reader.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path}: keys and values of different lengths are not supported")
    kv_heads = reader.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise reader.wrong("attention.head_count_kv", kv_heads)
    rotated = reader.integer("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise reader.wrong("rope.dimension_count", rotated)
    if reader.integer("expert_count", 0, minimum=0) and architecture.experts == "none":
        raise ModelError(
            f"{file.path}: {reader.prefix} models with experts are not supported from GGUF; use the model's folder"
        )
    config: dict[str, Any] = {
        "architectures": [architecture.model_class],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": _layers(reader),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": reader.integer("feed_forward_length", reader.get("expert_feed_forward_length")),
        "vocab_size": _vocab_size(reader),
        "max_position_embeddings": reader.integer("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": _token_id(file, "bos"),
        "eos_token_id": _token_id(file, "eos"),
        architecture.epsilon: _epsilon(reader, architecture),
    }
    for name, key, size in (
        ("token_embd.weight", "embedding_length", hidden),
        ("blk.0.ffn_down.weight", "feed_forward_length", config["intermediate_size"]),
    ):
        if name in file.tensors and file.tensors[name].shape[0] != size:
            raise reader.wrong(key, size)
    if architecture.delta_nets:
        config |= _delta_net_fields(reader, config["num_hidden_layers"])
    if architecture.llama_like:
        return config | _llama_fields(reader, config, rotated)
    return config | _other_fields(reader, architecture, config, rotated)


def _epsilon(reader: _GgufMetadata, architecture: GgufArchitecture) -> float:
    kind = "layer_norm_rms_epsilon" if architecture.epsilon == "rms_norm_eps" else "layer_norm_epsilon"
    return reader.number(f"attention.{kind}", below=1.0)


def _llama_fields(reader: _GgufMetadata, config: dict[str, Any], rotated: int) -> dict[str, Any]:
    """Return the rest of the config of a model like Llama."""
    tensors, model_type = reader.file.tensors, config["model_type"]
    fields: dict[str, Any] = {
        "rope_theta": reader.number("rope.freq_base", 10000.0, above=1.0),
        "rope_scaling": _rope_scaling(reader, rotated),
        "attention_bias": "blk.0.attn_q.bias" in tensors or model_type == "qwen2",
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "hidden_act": "silu",
        "sliding_window": reader.integer("attention.sliding_window", 0, minimum=0) or None,
    }
    if rotated != config["head_dim"]:
        fields["partial_rotary_factor"] = rotated / config["head_dim"]
    if model_type == "smollm3":
        # Every fourth layer has no rotary embedding. GGUF does not store this: it is part of the architecture.
        fields["no_rope_layer_interval"] = 4
        fields["no_rope_layers"] = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return fields


def _other_fields(
    reader: _GgufMetadata, architecture: GgufArchitecture, config: dict[str, Any], rotated: int
) -> dict[str, Any]:
    """Return the rest of the config of another model, by its architecture."""
    fields: dict[str, Any] = dict(architecture.constants)
    fields["pad_token_id"] = _token_id(reader.file, "padding")
    for name, key in architecture.fields.items():
        fields[name] = reader.positive(key)
    for name, key in architecture.optional_fields.items():
        fields[name] = None if reader.get(key) is None else reader.positive(key)
    for name, tensor in architecture.flags.items():
        fields[name] = tensor in reader.file.tensors
    if architecture.wide_query_layers:
        wide = config["num_hidden_layers"] == architecture.wide_query_layers
        size = config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
        fields["query_pre_attn_scalar"] = size
    rope = _rope_parameters(reader, architecture, config, rotated)
    if "original_max_position_embeddings" in rope:
        # Configs such as Phi-3's have a field of their own, which has a default and takes precedence.
        fields["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    if architecture.local_rope_theta:
        theta = reader.number("rope.freq_base_swa", architecture.local_rope_theta, above=1.0)
        local = {"rope_type": "default", "rope_theta": theta}
        fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}
    else:
        fields["rope_parameters"] = rope
    return fields | _windows(reader, architecture, config["num_hidden_layers"])


def _delta_net_fields(reader: _GgufMetadata, layers: int) -> dict[str, Any]:
    """Return the fields of a model with gated delta nets, without its layers that predict more than one token."""
    layers -= reader.integer("nextn_predict_layers", 0, minimum=0)
    heads, width = reader.integer("ssm.time_step_rank"), reader.integer("ssm.inner_size")
    if width % heads or layers < 1:
        raise reader.wrong(
            "ssm.inner_size" if width % heads else "nextn_predict_layers", width if width % heads else layers
        )
    every = reader.integer("full_attention_interval", 4)
    return {
        "num_hidden_layers": layers,
        "linear_num_key_heads": reader.integer("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": reader.integer("ssm.state_size"),
        "linear_value_head_dim": width // heads,
        "linear_conv_kernel_dim": reader.integer("ssm.conv_kernel"),
        "layer_types": ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)],
        "tiled_linear_values": True,
        "hidden_act": "silu",
    }


def _windows(reader: _GgufMetadata, architecture: GgufArchitecture, layers: int) -> dict[str, Any]:
    window = reader.integer("attention.sliding_window", 0, minimum=0) or None
    if not architecture.windowed:
        if window:
            raise ModelError(f"{reader.file.path}: {reader.prefix} with a sliding window is not supported from GGUF")
        return {}
    every = architecture.full_attention_every
    if not every:
        return {"sliding_window": window}
    stated = reader.get("attention.sliding_window_pattern")
    if isinstance(stated, list) and len(stated) == layers:
        local = [bool(each) for each in stated]
    else:
        every = every if isinstance(stated, list) else reader.integer("attention.sliding_window_pattern", every)
        local = [(layer + 1) % every != 0 for layer in range(layers)]
    types = ["sliding_attention" if window and each else "full_attention" for each in local]
    return {"sliding_window": window, "layer_types": types}


def _rope_parameters(
    reader: _GgufMetadata, architecture: GgufArchitecture, config: dict[str, Any], rotated: int
) -> dict[str, Any]:
    """Return the rotary parameters in the layout of `transformers`."""
    rope = _longrope(reader, config, rotated) or _rope_scaling(reader, rotated)
    if rope is None:
        rope = {"rope_type": "default"}
    else:
        rope = {**architecture.rope_constants, **rope}
    rope["rope_theta"] = reader.number("rope.freq_base", 10000.0, above=1.0)
    rope["partial_rotary_factor"] = rotated / config["head_dim"]
    return rope


def _longrope(reader: _GgufMetadata, config: dict[str, Any], rotated: int) -> dict[str, Any] | None:
    """Return the rotary scaling of a model with factors for short and long contexts, such as Phi-3."""
    found: dict[str, list[float]] = {}
    for name in ("short", "long"):
        factors = _frequency_factors(reader, f"rope_factors_{name}.weight", rotated)
        if factors is None:
            return None
        found[f"{name}_factor"] = factors
    original = reader.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": original, **found}
    if reader.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = reader.number("rope.scaling.attn_factor")
    return scaling


class _GgufMetadata:
    """Typed access to metadata keys with the architecture's prefix."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = str(file.metadata.get("general.architecture", ""))

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.prefix}.{key}")

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]  # one value per layer
        if value is None:
            value = default
        if type(value) is not int or not minimum <= value <= _MAX_INTEGER:
            raise self.wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None, *, above: float = 0.0, below: float = math.inf) -> float:
        value = self.get(key)
        if value is None:
            value = default
        if type(value) not in (int, float) or not above < value < below:
            raise self.wrong(key, value)
        return float(value)

    def positive(self, key: str) -> int | float:
        return self.number(key) if isinstance(self.get(key), float) else self.integer(key)

    def wrong(self, key: str, value: Any) -> ModelError:
        state = "missing" if value is None else quoted(value)
        return ModelError(f"{self.file.path}: {self.prefix}.{key} is {state}; convert the model again")


def _layers(reader: _GgufMetadata) -> int:
    """Return the number of layers. Refuse implausible ones, which would allocate memory layer by layer."""
    count = reader.integer("block_count")
    if count > _MAX_LAYERS:
        raise reader.wrong("block_count", count)
    found = [int(match[1]) for match in map(_LAYER_TENSOR.match, reader.file.tensors) if match]
    if max(found, default=-1) >= count:
        raise ModelError(
            f"{reader.file.path}: it has tensors of {max(found) + 1} layers, and {reader.prefix}.block_count is "
            f"{count}; convert the model again"
        )
    return count


def _vocab_size(reader: _GgufMetadata) -> int:
    embedding = reader.file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        return reader.integer("vocab_size")
    tokens, rows = reader.file.metadata.get("tokenizer.ggml.tokens"), embedding.shape[1]
    if isinstance(tokens, list) and len(tokens) != rows:
        raise ModelError(
            f"{reader.file.path}: token_embd.weight has {rows} rows, and tokenizer.ggml.tokens has {len(tokens)} "
            "tokens; convert the model again"
        )
    return rows


def _token_id(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value, tokens = file.metadata.get(key), file.metadata.get("tokenizer.ggml.tokens")
    if value in (None, _NO_TOKEN, -1):
        return None
    if type(value) is not int or (isinstance(tokens, list) and not 0 <= value < len(tokens)):
        raise ModelError(f"{file.path}: {key} is {quoted(value)}, which is not a token; convert the model again")
    return value


def _rope_scaling(reader: _GgufMetadata, rotated: int) -> dict[str, Any] | None:
    kind = reader.get("rope.scaling.type")
    if (factors := _frequency_factors(reader, "rope_freqs.weight", rotated)) is not None:
        # Of Llama 3.1 and later, GGUF stores the resulting factor of each frequency, for contexts of every length.
        if set(factors) == {1.0}:
            return None
        original = reader.integer("context_length")
        longrope = {"rope_type": "longrope", "original_max_position_embeddings": original, "attention_factor": 1.0}
        return {**longrope, "short_factor": factors, "long_factor": factors}
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{reader.file.path}: rope scaling of the type {quoted(kind)} is not supported")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": reader.number("rope.scaling.factor", 1.0)}
    if original := reader.integer("rope.scaling.original_context_length", 0, minimum=0):
        scaling["original_max_position_embeddings"] = original
    if kind == "yarn":
        for name, gguf_name in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            if reader.get(f"rope.scaling.{gguf_name}") is not None:
                scaling[name] = reader.number(f"rope.scaling.{gguf_name}")
    return scaling


def _frequency_factors(reader: _GgufMetadata, name: str, rotated: int) -> list[float] | None:
    """Return what each rotary frequency is divided by, or None if the file has no such tensor."""
    tensor = reader.file.tensors.get(name)
    if tensor is None:
        return None
    factors = reader.file.floats(name) if tensor.shape == (rotated // 2,) else []
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"{reader.file.path}: {name} is not {rotated // 2} factors; fetch it again")
    return factors
