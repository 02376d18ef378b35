"""The memory that a model on the Hub takes at least, before its files are downloaded. Imports no torch."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from syringa.engine.loading.model_size import ModelSize, read_model_size
from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription, describe
from syringa.modelfiles.preview import Preview

_FLOAT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_UNKNOWN_BYTES = 4  # of a weight: the most there is
_DIGIT = re.compile(r"\d")


def estimate_gguf(preview: Preview, *, native: bool, max_model_len: int) -> ModelSize:
    """Return what a GGUF file takes at least: its own size, or that of its weights in int8 if it is not quantized."""
    size, kind = preview.weight_bytes, preview.quantization
    floats = kind is None or kind in _FLOAT_BYTES
    parameters = int(size / (_FLOAT_BYTES.get(kind or "", _UNKNOWN_BYTES) if floats else _quantized_bytes(kind or "")))
    least = min(size, parameters)
    return ModelSize(
        name=preview.model,
        architecture="",
        format="GGUF",
        parameters=parameters,
        native=native,
        weights={"int8": least, "gguf": least, "bf16": 2 * least, "fp32": 4 * least},
        file_bytes=size,
        max_model_len=max_model_len,
    )


def read_folder(preview: Preview) -> tuple[ModelDescription, ModelSize]:
    """Return the description of a folder, as far as it is read before its tokenizer is here, and what it takes.

    Raise `ModelError` for a configuration that cannot be read.
    """
    files = preview.folder
    assert files is not None
    try:
        description = describe(files)
        size = read_model_size(files, description)
    except ModelError as error:
        raise ModelError(error.message.replace(files.path, preview.model)) from None
    if size.parameters:  # of a native family, whose configuration says it
        return description, size
    parameters = preview.weight_bytes // _stored_bytes(description.config)
    weights = {"int8": parameters, "bf16": 2 * parameters, "fp32": 4 * parameters}
    loading = {} if size.native else {"int8": 2 * parameters}
    return description, msgspec.structs.replace(size, parameters=parameters, weights=weights, loading=loading)


def _quantized_bytes(kind: str) -> float:
    """Return the bytes of a weight in a file with this quantization, rounded up: a bit more than its name says."""
    bits = _DIGIT.search(kind)
    return (int(bits[0]) + 1) / 8 if bits else 1


def _stored_bytes(config: dict[str, Any]) -> int:
    """Return the bytes of a weight in the files of a folder, at most."""
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        stated = source.get("dtype") or source.get("torch_dtype")
        if stated in ("bfloat16", "float16"):
            return 2
    return _UNKNOWN_BYTES
