"""Fetches the files of a model to a node: those that are here already, then the cache, then the server or the Hub."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from syringa.cluster.checksums import Checksums
from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join import error_message, parse_server_address, read_membership
from syringa.cluster.manifest import (
    HubSource,
    Manifest,
    ManifestPending,
    matches,
    model_digest,
    model_paths,
)
from syringa.cluster.model_cache import PART, CachedModel, ModelCache
from syringa.cluster.tls import client_context, describe_tls_error
from syringa.errors import ModelError
from syringa.modelfiles import locate
from syringa.modelfiles.download import Downloader, Progress, RemoteFile, progress_from
from syringa.modelfiles.hub import HubClient
from syringa.modelfiles.variants import HubName

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger("syringa.cluster")

CONNECT_SECONDS, READ_SECONDS = 10.0, 30.0
PENDING_SECONDS = 0.2  # between two requests while the server computes checksums; each of them waits there too
HUB_ATTEMPTS = 2
MANIFEST_CHANGES = 3  # attempts when the files of the server change during a download


class FilesChanged(Exception):
    """The files of the server are not those of the manifest any more."""


class NodeFiles:
    """The model files of a node that has joined a cluster."""

    def __init__(self, folder: Path, cache: ModelCache, *, sleep: Callable[[float], None] = time.sleep) -> None:
        """`folder`: that of the node, with its certificates."""
        self._folder, self._cache, self._sleep = folder, cache, sleep
        self._checksums = Checksums(cache.folder / "checksums")

    def fetch(self, model: str, progress: Progress) -> tuple[str, CachedModel | None]:
        """Return the path of a model on this node, and the model of the cache if it is there, which is in use then.

        `model`: its path or Hub name on the server. `progress` gets bytes and may raise to give up. Raises
        `ModelError`, and `ConfigError` if the certificates of the node cannot be used.
        """
        membership = read_membership(self._folder)
        if membership is None:  # this is the server's machine
            return model, None
        with _ServerClient(str(parse_server_address(membership.server)), self._folder, model, self._sleep) as server:
            for _ in range(MANIFEST_CHANGES):
                manifest = server.manifest(progress)
                if (path := self._in_place(model, manifest, progress)) is not None:
                    return path, None
                try:
                    return self._from_cache(model, manifest, server, progress)
                except FilesChanged:
                    logger.warning("cluster: files of the server have changed during a download: model=%s", model)
        raise ModelError(f"{model} could not be fetched: its files on the server keep changing")

    def _in_place(self, model: str, manifest: Manifest, progress: Progress) -> str | None:
        """Return the path of the same files outside of the cache, if this node has them."""
        try:
            files = locate(model)
            paths = model_paths(files)
            entry = Path(files.path).name if files.kind == "gguf" else ""
            if (uncertain := matches(manifest, entry, paths)) is None:
                return None
            expected = {paths[file.name]: file.sha256 for file in manifest.files}
            done, total = 0, sum(path.stat().st_size for path in uncertain)

            def advance(count: int) -> None:
                nonlocal done
                done += count
                progress(done, total)

            if any(self._checksums.compute(path, advance) != expected[path] for path in uncertain):
                logger.warning("cluster: the model of this node differs from the server's: path=%s", files.path)
                return None
            return str(Path(files.path).absolute())
        except (ModelError, OSError):
            return None

    def _from_cache(
        self, model: str, manifest: Manifest, server: _ServerClient, progress: Progress
    ) -> tuple[str, CachedModel]:
        def download(folder: Path) -> None:
            _download(model, manifest, server, folder, progress, self._sleep)

        cached = self._cache.acquire(model, manifest, download, progress)
        return str(cached.path / manifest.entry), cached


def _download(
    model: str,
    manifest: Manifest,
    server: _ServerClient,
    folder: Path,
    progress: Progress,
    sleep: Callable[[float], None],
) -> None:
    """Download the files of a manifest that a folder lacks."""
    done = 0
    with _HubSide(manifest.hub, sleep) as hub:
        for file in manifest.files:
            remote, target = RemoteFile(file.name, file.size, file.sha256), folder / file.name
            advance = progress_from(progress, done, manifest.size)
            if not (target.exists() and target.stat().st_size == file.size):
                part = target.with_name(target.name + PART)
                part.parent.mkdir(mode=0o700, exist_ok=True)
                if not hub.fetch(remote, part, advance) and not _fetch_twice(server, remote, part, advance):
                    raise ModelError(f"{file.name} of {model} arrived with a wrong checksum twice, and was deleted")
                part.rename(target)
            done += file.size
            progress(done, manifest.size)


def _fetch_twice(server: _ServerClient, file: RemoteFile, part: Path, progress: Callable[[int], None]) -> bool:
    """Download a file. One with a wrong checksum is deleted, and downloaded a second time."""
    for _ in range(2):
        if server.fetch(file, part, progress):
            return True
        logger.error("cluster: file arrived with a wrong checksum and was deleted: file=%s", file.name)
        part.unlink()
    return False


class _HubSide:
    """Files from the Hugging Face Hub, as long as it has those of the server."""

    def __init__(self, source: HubSource | None, sleep: Callable[[float], None]) -> None:
        """`source`: None if the Hub is not to be used."""
        self._source, self._client = source, None
        if source is not None:
            try:
                self._client = HubClient(HubName(source.repository), sleep, HUB_ATTEMPTS)
            except ModelError as error:
                self._give_up(error.message)

    def __enter__(self) -> _HubSide:
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.__exit__()

    def fetch(self, file: RemoteFile, part: Path, progress: Callable[[int], None]) -> bool:
        """Download a file, and return whether it has its checksum. After a failure, nothing more is requested."""
        if self._client is None or self._source is None:
            return False
        folder = f"{self._source.folder}/" if self._source.folder else ""
        remote = RemoteFile(folder + file.name, file.size, file.checksum)
        try:
            with part.open("ab+") as opened:
                if self._client.fetch(remote, self._source.commit, opened, progress):
                    return True
            part.unlink()
            self._give_up(f"the checksum of {remote.name} is not that of the server's file")
        except ModelError as error:
            self._give_up(error.message)
        return False

    def _give_up(self, reason: str) -> None:
        assert self._source is not None
        logger.warning(
            "cluster: files are fetched from the server, not from the Hub: repository=%s reason=%r",
            self._source.repository,
            reason,
        )
        self._source = None


class _ServerClient:
    """Requests of a node to the cluster's server about one model."""

    def __init__(self, server: str, folder: Path, model: str, sleep: Callable[[float], None]) -> None:
        import httpx

        self._server, self._model, self._sleep = server, model, sleep
        self._url = f"https://{server}/models/{model_digest(model)}"
        self._client = httpx.Client(
            verify=client_context(ClusterFolder(folder).files("node")),
            timeout=httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,  # no proxy
        )
        self._downloader = Downloader(
            self._client, model, self._explain, advice="the next attempt continues", describe=_describe, sleep=sleep
        )

    def __enter__(self) -> _ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def manifest(self, progress: Progress) -> Manifest:
        """Return the manifest, when the server has computed the checksums."""
        while True:
            content = self._downloader.get(f"{self._url}/manifest")
            try:
                manifest = msgspec.json.decode(content, type=Manifest | ManifestPending)
            except msgspec.DecodeError as error:
                raise ModelError(f"the manifest of {self._model} from {self._server} cannot be used: {error}") from None
            if isinstance(manifest, Manifest):
                return manifest
            progress(manifest.done, manifest.total)
            self._sleep(PENDING_SECONDS)

    def fetch(self, file: RemoteFile, part: Path, progress: Callable[[int], None]) -> bool:
        with part.open("ab+") as opened:
            return self._downloader.fetch(f"{self._url}/files/{quote(file.name, safe='')}", file, opened, progress)

    def _explain(self, response: httpx.Response) -> str:
        if response.status_code in (409, 416):
            raise FilesChanged
        message = error_message(response.read())
        return f"{self._model} could not be fetched from {self._server}: {message or f'status {response.status_code}'}"


def _describe(error: Exception) -> str:
    """Return the reason for a failed connection, which is among the causes of httpx's error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return describe_tls_error(cause or error)
