"""The manifest of a model: the files that a node needs to run it, with their checksums."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from syringa.errors import ModelError
from syringa.modelfiles import ModelFiles, forget_gguf, read_gguf

# What belongs to a model in a folder. Weights in other formats are not read by any engine.
SUFFIXES = frozenset({".safetensors", ".json", ".gguf", ".jinja", ".txt", ".model", ".tiktoken", ".py"})
_MODULE = re.compile(r"\d+_[A-Za-z]+")  # an inner folder of sentence-transformers, such as 1_Pooling


class ManifestFile(msgspec.Struct, frozen=True):
    name: str  # in the folder of the model; of a module, with that of its folder before it
    size: int
    sha256: str
    modified: int  # nanoseconds, Unix time

    def __post_init__(self) -> None:
        # Both become parts of paths.
        *folders, name = self.name.split("/")
        is_path = name not in ("", ".", "..") and all(map(_MODULE.fullmatch, folders)) and len(folders) < 2
        if not is_path or set(name) & set("\\\0"):
            raise ValueError(f"{self.name!r} is not the name of a file")
        if len(self.sha256) != 64 or not set(self.sha256) <= set("0123456789abcdef") or self.size < 0:
            raise ValueError(f"the checksum or the size of {self.name!r} is not one")


class HubSource(msgspec.Struct, frozen=True):
    """Where the same files are on the Hugging Face Hub."""

    repository: str
    commit: str
    folder: str = ""  # in the repository


class Manifest(msgspec.Struct, frozen=True, tag="manifest"):
    """The files of a model, sorted by name. `entry` is the GGUF file to load; empty: the folder."""

    entry: str
    files: tuple[ManifestFile, ...]
    hub: HubSource | None = None  # if nodes may use it

    def __post_init__(self) -> None:
        names = [file.name for file in self.files]
        if not names or len(set(names)) != len(names) or (self.entry and self.entry not in names):
            raise ValueError("the manifest lacks files")

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str:
        """The same for the same names and contents, wherever they are."""
        content = [self.entry, [(file.name, file.size, file.sha256) for file in self.files]]
        return hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:32]


class ManifestPending(msgspec.Struct, frozen=True, tag="pending"):
    """The server is still computing checksums: so many bytes of so many."""

    done: int
    total: int


def model_digest(reference: str) -> str:
    """Return the name of a model in the URLs of the cluster's server, from its path or Hub name there."""
    return hashlib.sha256(reference.encode()).hexdigest()[:32]


def model_paths(files: ModelFiles) -> dict[str, Path]:
    """Return the files of a model by name, with links resolved. Raises `ModelError`.

    Links lead to files in the same folder, or of the same repository in the Hub's cache: nothing else is given to nodes
    because of a link that came with a model.
    """
    path = Path(files.path)
    folder = path if files.kind == "folder" else path.parent
    try:
        if files.kind == "folder":
            modules = [each for each in folder.iterdir() if _MODULE.fullmatch(each.name) and each.is_dir()]
            found = [
                file
                for each in (folder, *modules)
                for file in each.iterdir()
                if file.suffix in SUFFIXES and file.is_file()
            ]
            allowed = [folder.resolve(), *(folder.resolve() / each.name for each in modules)]
        else:
            gguf = read_gguf(path)
            forget_gguf()
            found = [Path(each) for each in {gguf.path, *(tensor.file for tensor in gguf.tensors.values())}]
            allowed = [folder.resolve(), path.resolve().parent]
        if (repository := _hub_repository(folder)) is not None:
            allowed.append(repository.resolve() / "blobs")
        resolved = {each.relative_to(folder).as_posix(): each.resolve(strict=True) for each in sorted(found)}
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    for name, target in resolved.items():
        if target.parent not in allowed:
            raise ModelError(f"{folder / name} links to {target}, outside of the model's folder: put a copy there")
    return resolved


def hub_source(files: ModelFiles) -> HubSource | None:
    """Return where the files of a model in the Hub's cache come from; None for other models."""
    folder = Path(files.path) if files.kind == "folder" else Path(files.path).parent
    repository = _hub_repository(folder)
    if repository is None:
        return None
    commit, *inner = folder.relative_to(repository / "snapshots").parts
    return HubSource(repository.name.removeprefix("models--").replace("--", "/", 1), commit, "/".join(inner))


def matches(manifest: Manifest, entry: str, paths: Mapping[str, Path]) -> list[Path] | None:
    """Return the files whose checksums decide whether a model is the same; None if its names or sizes differ.

    A file with the same time of change is the same: the file system is shared, or the file was copied with its times.
    """
    if entry != manifest.entry or set(paths) != {file.name for file in manifest.files}:
        return None
    uncertain = []
    for file in manifest.files:
        try:
            stat = paths[file.name].stat()
        except OSError:
            return None
        if stat.st_size != file.size:
            return None
        if stat.st_mtime_ns != file.modified:
            uncertain.append(paths[file.name])
    return uncertain


def _hub_repository(folder: Path) -> Path | None:
    """Return the folder of the repository that a snapshot in the Hub's cache belongs to."""
    for parent in folder.parents:
        if parent.name == "snapshots" and parent.parent.name.startswith("models--"):
            return parent.parent
    return None
