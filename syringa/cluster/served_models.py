"""The models whose files the cluster's server gives to nodes: those that it serves, and nothing else.

The supervisor publishes their paths and Hub names in a file, which the server reads again when it changes.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from syringa.cluster.checksums import Checksums
from syringa.cluster.folder import replace_file
from syringa.cluster.manifest import (
    Manifest,
    ManifestFile,
    ManifestPending,
    hub_source,
    model_digest,
    model_paths,
)
from syringa.errors import ModelError, NotFound, RequestError
from syringa.modelfiles import ModelFiles, locate

logger = logging.getLogger("syringa.cluster")


class FileChanged(RequestError):
    """A file is not the one of the manifest any more."""

    status = 409
    code = "file_changed"


class ServedFile(msgspec.Struct, frozen=True):
    """An open file of a model."""

    file: BinaryIO
    size: int
    sha256: str


def publish(file: Path, references: Iterable[str]) -> None:
    """Name the models that nodes may fetch, by their paths and Hub names on the server. Raises `OSError`."""
    replace_file(file, msgspec.json.encode(sorted(set(references))))


class ServedModels:
    """Manifests and files of the published models. Used by several threads."""

    def __init__(self, file: Path, checksums: Checksums, *, hub: bool = False) -> None:
        """`hub`: whether nodes may fetch files from the Hugging Face Hub where the same ones are."""
        self._file, self._checksums, self._hub = file, checksums, hub
        self._lock = threading.Lock()
        self._computing = threading.Lock()  # one model at a time, so that disks are read in order
        self._read: tuple[int, ...] = ()  # version of the file that was read
        self._references: dict[str, str] = {}  # by digest
        self._paths: dict[str, dict[str, Path]] = {}  # files by name, by digest
        self._jobs: dict[str, _ChecksumJob] = {}  # by digest

    def manifest(self, digest: str, wait: float) -> Manifest | ManifestPending:
        """Return the manifest of a model, or how far its checksums are after `wait` seconds. Raises `RequestError`."""
        files, paths = self._locate(digest, self._reference(digest))
        try:
            if (manifest := self._known(files, paths)) is not None:
                return manifest
            job = self._job(digest, paths)
            if not job.finished.wait(wait):
                return ManifestPending(job.done, job.total)
            with self._lock:
                self._jobs.pop(digest, None)
            if job.error is not None:
                raise job.error
            return self._known(files, paths) or ManifestPending(0, job.total)  # a file has changed meanwhile
        except OSError as error:
            raise FileChanged(f"a file of the model cannot be read: {error}") from None

    def open(self, digest: str, name: str) -> ServedFile:
        """Open a file of a model's manifest. The caller closes it. Raises `RequestError`."""
        reference = self._reference(digest)
        with self._lock:
            paths = self._paths.get(digest)
        if paths is None:  # the manifest is from before a restart
            paths = self._locate(digest, reference)[1]
        if (path := paths.get(name)) is None:
            raise NotFound(f"{name[:200]!r} is not a file of this model", code="file_not_found")
        try:
            # The path has no links: one that has been put there since is not followed.
            file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")
        except OSError as error:
            raise FileChanged(f"{name} cannot be read: {error.strerror}") from None
        stat = os.fstat(file.fileno())
        checksum = self._checksums.known(path, stat)
        if checksum is None:
            file.close()
            raise FileChanged(f"{name} has changed since its manifest was made")
        return ServedFile(file, stat.st_size, checksum)

    def _reference(self, digest: str) -> str:
        with self._lock:
            try:
                stat = os.stat(self._file)
                version = stat.st_ino, stat.st_mtime_ns, stat.st_size
                if version != self._read:
                    references = msgspec.json.decode(self._file.read_bytes(), type=list[str])
                    self._references = {model_digest(each): each for each in references}
                    self._paths = {each: paths for each, paths in self._paths.items() if each in self._references}
                    self._read = version
            except (OSError, msgspec.DecodeError) as error:
                logger.error("cluster: models cannot be read: file=%s reason=%r", self._file, str(error))
                self._references = {}
            if (reference := self._references.get(digest)) is None:
                raise NotFound("this server does not serve such a model", code="model_not_found")
            return reference

    def _locate(self, digest: str, reference: str) -> tuple[ModelFiles, dict[str, Path]]:
        try:
            files = locate(reference)
            paths = model_paths(files)
        except ModelError as error:
            logger.error("cluster: model cannot be given to nodes: model=%s reason=%r", reference, error.message)
            raise NotFound(error.message, code="model_not_found") from None
        with self._lock:
            self._paths[digest] = paths
        return files, paths

    def _known(self, files: ModelFiles, paths: dict[str, Path]) -> Manifest | None:
        """Return the manifest if all checksums are known."""
        listed = []
        for name, path in paths.items():
            stat = path.stat()
            if (checksum := self._checksums.known(path, stat)) is None:
                return None
            listed.append(ManifestFile(name, stat.st_size, checksum, stat.st_mtime_ns))
        entry = Path(files.path).name if files.kind == "gguf" else ""
        return Manifest(entry, tuple(listed), hub_source(files) if self._hub else None)

    def _job(self, digest: str, paths: dict[str, Path]) -> _ChecksumJob:
        with self._lock:
            if digest not in self._jobs:
                self._jobs[digest] = _ChecksumJob(self._checksums, list(paths.values()), self._computing)
                self._jobs[digest].start()
            return self._jobs[digest]


class _ChecksumJob(threading.Thread):
    """Computes the checksums of a model."""

    def __init__(self, checksums: Checksums, paths: list[Path], turn: threading.Lock) -> None:
        super().__init__(daemon=True, name="checksums")
        self.done, self.total = 0, sum(path.stat().st_size for path in paths)
        self.error: OSError | None = None
        self.finished = threading.Event()
        self._checksums, self._paths, self._turn = checksums, paths, turn

    def run(self) -> None:
        try:
            with self._turn:
                for path in self._paths:
                    self._checksums.compute(path, self._advance)
        except OSError as error:
            self.error = error
        finally:
            self.finished.set()

    def _advance(self, count: int) -> None:
        self.done += count
