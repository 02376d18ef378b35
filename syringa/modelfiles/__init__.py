"""Model files on disk: locating them, reading their description and tokenizer, and downloading. Torch-free."""

from syringa.modelfiles.description import ModelDescription, count_weights, describe
from syringa.modelfiles.embedding import DenseModule, EmbeddingSpec, model_kind, read_embedding_spec
from syringa.modelfiles.gguf import GgufFile, TensorInfo, forget_gguf, read_gguf, read_metadata
from syringa.modelfiles.gguf_config import config_from_gguf
from syringa.modelfiles.locate import (
    DEFAULT_MODEL,
    SAFETENSORS_INDEX,
    KnownModel,
    ModelFiles,
    known_models,
    locate,
    read_json,
)
from syringa.modelfiles.preview import open_preview
from syringa.modelfiles.pull import can_pull, catalog_entry, pull
from syringa.modelfiles.tokenizer import load_tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "SAFETENSORS_INDEX",
    "DenseModule",
    "EmbeddingSpec",
    "GgufFile",
    "KnownModel",
    "ModelDescription",
    "ModelFiles",
    "TensorInfo",
    "can_pull",
    "catalog_entry",
    "config_from_gguf",
    "count_weights",
    "describe",
    "forget_gguf",
    "known_models",
    "load_tokenizer",
    "locate",
    "model_kind",
    "open_preview",
    "pull",
    "read_embedding_spec",
    "read_gguf",
    "read_json",
    "read_metadata",
]
