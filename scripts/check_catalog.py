"""Compare the models of the catalog with their files: `python -m scripts.check_catalog`.

Those on the Hugging Face Hub are compared with its list of files and the beginning of the GGUF file, which needs a
network; those of the package index with what `syringa pull` has put on this machine. Prints one line per model, and
exits with status 1 if something differs or was not compared. Sizes may differ by 2 %.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import msgspec

from syringa.engine.models.config import is_native
from syringa.errors import ModelError
from syringa.modelfiles import catalog, describe, locate, open_preview, read_embedding_spec, read_metadata
from syringa.modelfiles.catalog import CatalogModel
from syringa.modelfiles.gguf_config import check_architecture
from syringa.modelfiles.variants import HubName

TOLERANCE = 0.02
_CACHE_ITEM_BYTES = 2
_LICENSE_LINE = re.compile(r"^license: *(\S+)", re.MULTILINE)


class Facts(msgspec.Struct, frozen=True):
    """What the files of a model say. None: they do not say it."""

    bytes: int
    context: int | None
    cache_bytes: int | None
    license: str | None
    vocabulary: int | None
    hidden: int | None


def read_facts(model: CatalogModel) -> Facts:
    """Raise `ModelError` if the files are not there, or of an architecture that does not run."""
    if isinstance(model.source, HubName):
        with open_preview(str(model.source)) as preview:
            return _gguf_facts(model.name, preview.metadata, preview.weight_bytes, preview.license)
    files = locate(model.name)
    path = Path(files.path)
    if files.kind == "gguf":
        return _gguf_facts(model.name, read_metadata(path), path.stat().st_size, None)
    spec = read_embedding_spec(files)
    found = _LICENSE_LINE.search((path / "README.md").read_text()) if (path / "README.md").is_file() else None
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    description = describe(files)
    context = spec.max_length if spec is not None else description.max_model_len
    cache, license_name = 0 if spec is not None else None, found[1] if found else None
    config = description.config
    return Facts(size, context, cache, license_name, config.get("vocab_size"), config.get("hidden_size"))


def _gguf_facts(name: str, metadata: dict[str, Any], size: int, license_tag: str | None) -> Facts:
    architecture = check_architecture(metadata, name)
    if not is_native({"model_type": architecture.model_type}):
        raise ModelError(f"{name}: the native decoder does not run {architecture.model_type}")

    def number(key: str) -> int | None:
        value = metadata.get(f"{metadata['general.architecture']}.{key}")
        return value if type(value) is int else None

    layers, hidden, heads = number("block_count"), number("embedding_length"), number("attention.head_count")
    kv_heads = number("attention.head_count_kv") or heads
    head_size = number("attention.key_length") or (hidden // heads if hidden and heads else None)
    cache = 2 * layers * kv_heads * head_size * _CACHE_ITEM_BYTES if layers and kv_heads and head_size else None
    stated = license_tag or metadata.get("general.license")
    tokens = metadata.get("tokenizer.ggml.tokens")
    vocabulary = len(tokens) if isinstance(tokens, list) else number("vocab_size")
    return Facts(size, number("context_length"), cache, stated, vocabulary, hidden)


def differences(model: CatalogModel, facts: Facts) -> list[str]:
    """Return what the catalog has wrong, or what the files do not say."""
    found = []
    if abs(facts.bytes - model.bytes) > TOLERANCE * facts.bytes:
        found.append(f"{facts.bytes:,} bytes, and {model.bytes:,} in the catalog")
    for what, stated, entry in (
        ("context", facts.context, model.context),
        ("cache bytes", facts.cache_bytes, model.cache_bytes),
        ("license", _normalized(facts.license), _normalized(model.license)),
        ("vocabulary", facts.vocabulary, model.vocabulary),
        ("hidden size", facts.hidden, model.hidden),
    ):
        if stated is None and what == "license" and not isinstance(model.source, HubName):
            continue  # it is that of the wheel
        if stated is None and what == "vocabulary":
            continue  # the beginning of a file may not say it
        if stated != entry:
            found.append(f"{what} {'not stated' if stated is None else stated}, and {entry} in the catalog")
    return found


def _normalized(license_name: str | None) -> str | None:
    """Return `Llama 3.2` as the Hub writes it, `llama3.2`."""
    return license_name.lower().replace(" ", "") if license_name else None


def main() -> int:
    wrong = 0
    for model in catalog.CATALOG:
        try:
            found = differences(model, read_facts(model))
        except ModelError as error:
            found = [error.message]
        print(f"{model.name}: {'; '.join(found) or 'as in the catalog'}")
        wrong += bool(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
