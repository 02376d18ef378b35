"""What Ollama's API tells of a model's files: size, digest, format, family, number of parameters, quantization."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Annotated, Any

import msgspec

from syringa import modelfiles
from syringa.api.fields.schema import doc
from syringa.errors import StartupError
from syringa.modelfiles.variants import quantization

_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_SHOWN_CONFIG = {
    # Names of GGUF metadata, and of the fields of config.json that have the same meaning.
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "vocab_size": "vocab_size",
}


class OllamaModelDetails(msgspec.Struct, frozen=True, kw_only=True):
    parent_model: Annotated[str, doc("Empty: a created model has its parent's files.")] = ""
    format: Annotated[str, doc("`gguf` or `safetensors`; empty if the files cannot be read.")] = ""
    family: Annotated[str, doc("Architecture of the model.")] = ""
    families: list[str] = []
    parameter_size: Annotated[str, doc("Such as `135M` or `1.5B`.")] = ""
    quantization_level: Annotated[str, doc("Such as `Q4_K_M` or `BF16`.")] = ""


class ModelFileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of the files of a model. `digest` changes with them, but is not that of their content."""

    size: int = 0
    modified_at: float = 0.0
    digest: str = ""
    details: OllamaModelDetails = OllamaModelDetails()
    info: dict[str, Any] = {}  # in the names of GGUF metadata


_remembered: dict[str, tuple[modelfiles.ModelFiles, tuple[Any, ...], ModelFileFacts]] = {}  # by the configured path


def unknown_facts(name: str) -> ModelFileFacts:
    """Return the facts of files that cannot be read. Their digest is that of a name: clients cut it, and need one."""
    return ModelFileFacts(digest=hashlib.sha256(name.encode()).hexdigest())


def read_facts(path: str) -> ModelFileFacts:
    """Return the facts of the model at a path of the configuration; those of no files if they cannot be read.

    Reads the header of the weights, unless it has done so before and they are the same.
    """
    with contextlib.suppress(OSError):
        if (known := _remembered.get(path)) is not None and _state(known[0]) == known[1]:
            return known[2]
    try:
        files = modelfiles.locate(path)
        state = _state(files)
        facts = _read(files, state)
    except (StartupError, OSError):
        _remembered.pop(path, None)
        return unknown_facts(path)
    finally:
        modelfiles.forget_gguf()
    _remembered[path] = files, state, facts
    return facts


def _state(files: modelfiles.ModelFiles) -> tuple[Any, ...]:
    """Return the names, sizes and times of the files, which tell whether they have changed."""
    path = Path(files.path)
    found = [path] if files.kind == "gguf" else sorted(each for each in path.rglob("*") if each.is_file())
    return tuple((str(each), (stat := os.stat(each)).st_size, stat.st_mtime) for each in found)


def _read(files: modelfiles.ModelFiles, state: tuple[Any, ...]) -> ModelFileFacts:
    description = modelfiles.describe(files)
    count = modelfiles.count_weights(files)
    config = description.config
    size = sum(each[1] for each in state)
    if files.kind == "gguf":
        gguf = modelfiles.read_gguf(files.path)
        family = str(gguf.metadata.get("general.architecture", ""))
        level = quantization(Path(files.path).name) or _most_common_type(gguf)
        size = sum(os.stat(part).st_size for part in {tensor.file for tensor in gguf.tensors.values()} | {gguf.path})
    else:
        family = str(config.get("model_type", ""))
        method = config.get("quantization_config")
        dtype = str(config.get("torch_dtype") or config.get("dtype") or "")
        level = str(method.get("quant_method", "")).upper() if isinstance(method, dict) else _DTYPES.get(dtype, dtype)
    shown = {name: config[field] for name, field in _SHOWN_CONFIG.items() if isinstance(config.get(field), int)}
    info: dict[str, Any] = {"general.architecture": family, "general.parameter_count": count}
    info |= {f"{family}.{name}": value for name, value in sorted(shown.items())}
    info[f"{family}.context_length"] = description.max_model_len
    identity = repr([(Path(name).name, *rest) for name, *rest in state])
    return ModelFileFacts(
        size=size,
        modified_at=max(each[2] for each in state),
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        details=OllamaModelDetails(
            format="gguf" if files.kind == "gguf" else "safetensors",
            family=family,
            families=[family],
            parameter_size=parameter_size(count),
            quantization_level=level,
        ),
        info=info,
    )


def _most_common_type(gguf: modelfiles.GgufFile) -> str:
    """Return the type of the tensors that have the most bytes."""
    sizes: dict[str, int] = {}
    for tensor in gguf.tensors.values():
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.size
    return max(sizes, key=lambda each: sizes[each], default="")


def parameter_size(count: int) -> str:
    """Return a number of parameters as Ollama writes it."""
    for unit, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= unit:
            return f"{count / unit:.1f}{name}" if unit >= 10**9 else f"{count / unit:.2f}{name}"
    return str(count)
