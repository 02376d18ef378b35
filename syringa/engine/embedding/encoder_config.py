"""Configuration of the native encoder, read from a Hugging Face config. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from syringa.errors import ModelError

# Types of the native encoder, and the prefix of their tensors in a model with a head.
PREFIXES = {"bert": "bert.", "roberta": "roberta.", "xlm-roberta": "roberta.", "camembert": "roberta."}
_SIZES = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"),
    *("max_position_embeddings", "type_vocab_size"),
)
_MAX_SIZE = 2**31 - 1
_MAX_LAYERS = 4096  # more would allocate memory for each before a missing tensor is found


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes and flags of an encoder with learned positions and a norm after each residual."""

    prefix: str  # of the tensors' names, in a model with a head
    hidden: int
    layers: int
    heads: int
    intermediate: int
    vocab: int
    positions: int
    types: int
    eps: float
    # Of RoBERTa, which numbers positions from the one after the padding token's id on, and does not count tokens with
    # that id; -1: positions begin with 0.
    padding: int = -1

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """The number of weights, without norms and biases."""
        layer = 4 * self.hidden**2 + 2 * self.hidden * self.intermediate
        return self.layers * layer + (self.vocab + self.positions + self.types) * self.hidden


def is_native_encoder(config: dict[str, Any]) -> bool:
    """Return whether the native encoder supports a model."""
    return (
        config.get("model_type") in PREFIXES
        and config.get("hidden_act", "gelu") == "gelu"
        and config.get("position_embedding_type", "absolute") == "absolute"
        and not config.get("is_decoder")
        and "quantization_config" not in config
    )


def read_encoder_config(config: dict[str, Any]) -> EncoderConfig:
    """Read a Hugging Face config. Raise `ModelError` naming what is missing or impossible."""
    for name in _SIZES:
        size, largest = config.get(name), _MAX_LAYERS if name == "num_hidden_layers" else _MAX_SIZE
        if type(size) is not int or not 0 < size <= largest:
            raise ModelError(f"config.json: {name} is {size!r}, which is not a size that can be loaded")
    hidden, heads, eps = config["hidden_size"], config["num_attention_heads"], config.get("layer_norm_eps", 1e-12)
    if hidden % heads:
        raise ModelError(f"config.json: {hidden} components cannot be divided among {heads} attention heads")
    if type(eps) not in (int, float) or not 0 <= eps < 1:
        raise ModelError(f"config.json: layer_norm_eps is {eps!r}")
    padding = -1
    if config["model_type"] != "bert":
        padding = config.get("pad_token_id", 1)
        if type(padding) is not int or not 0 <= padding < config["max_position_embeddings"] - 1:
            raise ModelError(f"config.json: pad_token_id is {padding!r}")
    return EncoderConfig(
        prefix=PREFIXES[config["model_type"]],
        hidden=hidden,
        layers=config["num_hidden_layers"],
        heads=heads,
        intermediate=config["intermediate_size"],
        vocab=config["vocab_size"],
        positions=config["max_position_embeddings"],
        types=config["type_vocab_size"],
        eps=float(eps),
        padding=padding,
    )
