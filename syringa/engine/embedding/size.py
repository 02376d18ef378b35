"""Which embedding models run natively, and the memory that one takes. Imports no torch."""

from __future__ import annotations

from typing import Any

from syringa.engine.embedding.encoder_config import is_native_encoder
from syringa.engine.models.config import LLAMA_TYPES, is_native
from syringa.modelfiles import EmbeddingSpec

STEP_TOKENS = 512  # of a step on a CPU by default; a longer input is computed alone


def is_native_embedding(config: dict[str, Any]) -> bool:
    """Return whether an embedding model runs natively: as an encoder, or as a decoder whose attention is causal."""
    if is_native_encoder(config):
        return True
    causal = config.get("is_causal", True) is not False and not config.get("use_bidirectional_attention")
    quantized = bool(config.get("quantization_config"))
    return causal and not quantized and config.get("model_type") in LLAMA_TYPES and is_native(config)


def embedding_weights(parameters: int, tables: int, spec: EmbeddingSpec) -> dict[str, int]:
    """Return the bytes of the weights on a CPU, by dtype. `tables`: the number of those in the embedding of tokens."""
    dense = 4 * sum(module.in_features * module.out_features for module in spec.dense)
    return {"int8": parameters + tables + dense, "bf16": 2 * parameters + dense, "fp32": 4 * parameters + dense}


def step_bytes(hidden: int, inner: int, max_length: int) -> int:
    """Return the bytes of a step's activations: those of a layer, in fp32 and quantized."""
    return max(STEP_TOKENS, max_length) * 6 * (6 * hidden + 2 * inner)
