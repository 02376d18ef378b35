"""What a repository on the Hugging Face Hub tells about a model before it is downloaded."""

from __future__ import annotations

import contextlib
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from syringa.modelfiles.download import RemoteFile, Waiting
from syringa.modelfiles.gguf import read_first_metadata
from syringa.modelfiles.hub import HubClient, Listing
from syringa.modelfiles.locate import ModelFiles, hub_name
from syringa.modelfiles.variants import HubName, quantization, select_files

# Of a GGUF file: its architecture is the first key, and the vocabulary, which takes megabytes, comes later.
_HEADER_BYTES = 64 << 10
_MAX_CONFIG_BYTES = 1 << 20
_CONFIG_FILES = re.compile(
    r"(config|modules|config_sentence_transformers|sentence_[a-z-]+_config)\.json|\d+_[A-Za-z]+/config\.json"
)


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """A model that is not here yet, either GGUF or a folder."""

    model: str
    weight_bytes: int  # of its files with weights
    quantization: str | None = None  # of a GGUF file, by its name
    metadata: dict[str, Any] = {}  # of a GGUF file: the first keys
    license: str | None = None  # of the repository
    # A temporary folder with the configuration of a folder. It has no weights, and an empty tokenizer.
    folder: ModelFiles | None = None


@contextlib.contextmanager
def open_preview(model: str, on_wait: Waiting = lambda seconds, reason: None) -> Iterator[Preview]:
    """Read the small files of a model on the Hub, or the beginning of its GGUF file.

    `on_wait` is called before a request is sent again. Raise `ModelError` if it is not there, or cannot be reached.
    """
    name = hub_name(model)
    assert name is not None
    with (
        HubClient(name, time.sleep, on_wait=on_wait) as client,
        tempfile.TemporaryDirectory(prefix="syringa-") as folder,
    ):
        listing = client.list()
        files = {file.name: file for file in listing.files}
        needed = [files[each] for each in select_files(name, list(files))]
        if needed[0].name.lower().endswith(".gguf"):
            yield _preview_gguf(client, model, listing, needed)
        else:
            yield _preview_folder(client, name, listing, needed, Path(folder))


def _preview_gguf(client: HubClient, model: str, listing: Listing, parts: list[RemoteFile]) -> Preview:
    return Preview(
        model=model,
        weight_bytes=sum(part.size for part in parts),
        quantization=quantization(parts[0].name),
        metadata=read_first_metadata(client.read(parts[0], listing.commit, _HEADER_BYTES)),
        license=listing.license,
    )


def _preview_folder(
    client: HubClient, name: HubName, listing: Listing, needed: list[RemoteFile], folder: Path
) -> Preview:
    for file in needed:
        if not _CONFIG_FILES.fullmatch(file.name):
            continue
        path = folder / file.name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(client.read(file, listing.commit, _MAX_CONFIG_BYTES))
    (folder / "tokenizer.json").write_text("{}")
    return Preview(
        model=str(name),
        weight_bytes=sum(file.size for file in needed if file.name.endswith(".safetensors")),
        license=listing.license,
        folder=ModelFiles(str(name), str(folder), "folder"),
    )
