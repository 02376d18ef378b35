"""What a model is on disk: where its files lie, what they say of it, and its tokenizer. Nothing here imports torch."""

from syringa.modelfiles.description import ModelDescription, describe
from syringa.modelfiles.gguf import GgufFile, TensorInfo, read_gguf, read_metadata
from syringa.modelfiles.gguf_config import config_from_gguf
from syringa.modelfiles.locate import DEFAULT_MODEL, INDEX, KnownModel, ModelFiles, known_models, locate, read_json
from syringa.modelfiles.pull import pull
from syringa.modelfiles.sizes import count_weights
from syringa.modelfiles.tokenizer import load_tokenizer

__all__ = [
    "DEFAULT_MODEL",
    "INDEX",
    "GgufFile",
    "KnownModel",
    "ModelDescription",
    "ModelFiles",
    "TensorInfo",
    "config_from_gguf",
    "count_weights",
    "describe",
    "known_models",
    "load_tokenizer",
    "locate",
    "pull",
    "read_gguf",
    "read_json",
    "read_metadata",
]
