"""What the admin API tells of a model's files: where they are, their size, and whether they may be deleted."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import msgspec

from syringa import modelfiles
from syringa.api.fields.schema import doc
from syringa.errors import StartupError
from syringa.modelfiles import catalog
from syringa.modelfiles.remove import is_pulled

_CACHE_VALUE_BYTES = 2  # of a value in the KV cache


class ModelFilesEntry(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model on this machine."""

    path: str
    bytes: int
    deletable: Annotated[bool, doc("Whether they were pulled, so that `files=true` deletes them.")]


class AvailableModel(msgspec.Struct, kw_only=True):
    """A model that can be pulled by a short name."""

    object: Annotated[str, doc("`available_model`.", const="available_model")] = "available_model"
    name: str
    kind: Annotated[str, doc("`generate`: text; `embed`: embeddings.")]
    parameters: Annotated[str, doc("Such as `0.6B`.")]
    bytes: Annotated[int, doc("Size of its files.")]
    memory_bytes: Annotated[int, doc("Memory that it takes, with a short KV cache.")]
    context: Annotated[int, doc("Maximum prompt plus output length, in tokens.")]
    license: str
    source: Annotated[str | None, doc("Name on the Hugging Face Hub; null: it comes from the package index.")]
    present: Annotated[bool, doc("Whether its files are on this machine.")]


class AvailableModelList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[AvailableModel]


class KnownFiles(msgspec.Struct, frozen=True):
    """Files that were read once."""

    files: modelfiles.ModelFiles
    modified_at: int
    bytes: int
    cache_bytes: int  # of the KV cache, per token


_known: dict[str, KnownFiles] = {}  # by the configured path


def find_files(path: str) -> KnownFiles | None:
    """Return the files of the model at a path of the configuration; None if they are not here, or broken.

    Reads the header of the weights, unless it has done so before and they are the same.
    """
    with contextlib.suppress(OSError):
        if (known := _known.get(path)) is not None and os.stat(known.files.path).st_mtime_ns == known.modified_at:
            return known
    try:
        files = modelfiles.locate(path)
        known = _known[path] = KnownFiles(
            files, os.stat(files.path).st_mtime_ns, _size(files), _cache_bytes(modelfiles.describe(files).config)
        )
    except (StartupError, OSError):
        _known.pop(path, None)
        return None
    finally:
        modelfiles.forget_gguf()
    return known


def files_entry(known: KnownFiles | None) -> ModelFilesEntry | None:
    if known is None:
        return None
    return ModelFilesEntry(path=known.files.path, bytes=known.bytes, deletable=is_pulled(known.files))


def available_models() -> list[AvailableModel]:
    """Return the models of the catalog. Reads the headers of those that are here."""
    return [
        AvailableModel(
            name=model.name,
            kind=model.kind,
            parameters=model.parameters,
            bytes=model.bytes,
            memory_bytes=model.memory,
            context=model.context,
            license=model.license,
            source=None if model.file is not None else str(model.source),
            present=find_files(model.name) is not None,
        )
        for model in catalog.CATALOG
    ]


def _size(files: modelfiles.ModelFiles) -> int:
    path = Path(files.path)
    if files.kind == "gguf":
        gguf = modelfiles.read_gguf(path)
        return sum(os.stat(part).st_size for part in {tensor.file for tensor in gguf.tensors.values()} | {gguf.path})
    return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())


def _cache_bytes(config: dict[str, object]) -> int:
    """Return the bytes that a token takes in the KV cache; 0 if the configuration does not tell."""
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    hidden, shared = config.get("hidden_size"), config.get("num_key_value_heads") or heads
    if not (isinstance(layers, int) and isinstance(heads, int) and isinstance(hidden, int) and isinstance(shared, int)):
        return 0
    width = config.get("head_dim")
    size = width if isinstance(width, int) else hidden // max(1, heads)
    return 2 * layers * shared * size * _CACHE_VALUE_BYTES
