"""Downloads from the Hugging Face Hub into its cache, which other programs share.

The library huggingface_hub starts an interrupted file again from its beginning; here it continues, in a later process
too.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote, unquote

import msgspec

from syringa.errors import ModelError
from syringa.modelfiles.download import (
    ATTEMPTS,
    Downloader,
    FileProgress,
    Progress,
    RemoteFile,
    Waiting,
    progress_from,
)
from syringa.modelfiles.locate import hub_cache, hub_home
from syringa.modelfiles.variants import HubName, select_files

if TYPE_CHECKING:
    import httpx

_ENDPOINT = "https://huggingface.co"
_RESERVE = 64 << 20  # bytes of the disk that stay free
# Of `symlink`, on disks without symbolic links, such as one with exFAT.
_NO_SYMBOLIC_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)
_PART = ".syringa-part"
_SET_TOKEN = "and set HF_TOKEN to a token of your account"
_LICENSE_TAG = "license:"
_REVISION = re.compile(r"[0-9a-f]{6,64}")


class Listing(msgspec.Struct, frozen=True):
    commit: str
    files: tuple[RemoteFile, ...]
    license: str | None = None  # as the repository states it, such as `apache-2.0`


def download(
    name: HubName,
    progress: Progress,
    sleep: Callable[[float], None] = time.sleep,
    *,
    on_file: FileProgress = lambda file, done: None,
    on_wait: Waiting = lambda seconds, reason: None,
) -> None:
    """Download what a model needs, and check it. What an interrupted download has left is continued.

    An exception that `progress`, `on_file` or `on_wait` raises ends the download.
    """
    with HubClient(name, sleep, on_wait=on_wait) as client:
        listing = client.list()
        files = {file.name: file for file in listing.files}
        needed = [files[file] for file in select_files(name, list(files))]
        cache = _RepositoryCache(name, listing.commit)
        missing = [file for file in needed if not cache.has(file)]
        total = sum(file.size for file in needed)
        done = total - sum(file.size for file in missing)
        cache.check_space(sum(file.size - cache.partial_size(file) for file in missing))
        progress(done, total)
        for file in missing:
            report = progress_from(progress, done, total)

            def report_file(size: int, file: RemoteFile = file, report: Callable[[int], None] = report) -> None:
                report(size)
                on_file(file, size)

            with cache.open_part(file) as part:
                if not client.fetch(file, listing.commit, part, report_file):
                    cache.discard(file)
                    raise ModelError(
                        f"{file.name} of {name} arrived with a wrong checksum and was deleted: pull it again"
                    )
                cache.keep(file)
            done += file.size
        cache.finish(needed)
        progress(total, total)


def list_files(name: HubName) -> tuple[RemoteFile, ...]:
    """Return all files of a repository."""
    with HubClient(name, time.sleep) as client:
        return client.list().files


def offline() -> bool:
    """Whether the environment keeps from any download."""
    return os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "on", "yes", "true")


def _token() -> str | None:
    """Return the access token: of the environment, or of `hf auth login`."""
    if token := os.environ.get("HF_TOKEN", "").strip():
        return token
    path = os.environ.get("HF_TOKEN_PATH")
    with contextlib.suppress(OSError):
        return (Path(path).expanduser() if path else hub_home() / "token").read_text().strip() or None
    return None


class _RepositoryCache:
    """The part of the Hub's cache that holds one commit of a repository: blobs, and links to them by file name."""

    def __init__(self, name: HubName, commit: str) -> None:
        self._name, self._commit = name, commit
        self.folder = hub_cache() / ("models--" + name.repository.replace("/", "--"))

    def has(self, file: RemoteFile) -> bool:
        for path in (self._blob(file), self._link(file)):
            with contextlib.suppress(OSError):
                if path.stat().st_size == file.size:
                    return True
        return False

    def partial_size(self, file: RemoteFile) -> int:
        try:
            return min(file.size, self._part(file).stat().st_size)
        except OSError:
            return 0

    def check_space(self, needed: int) -> None:
        """Raise `ModelError` if the disk has no room for so many bytes, and some more."""
        folder = hub_cache()
        with self._storing():
            existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
            free = shutil.disk_usage(existing).free
        if needed + _RESERVE > free:
            raise ModelError(
                f"{self._name} needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free in {folder}; "
                "the variable HF_HOME names another folder"
            )

    @contextlib.contextmanager
    def open_part(self, file: RemoteFile) -> Any:
        """Open the file that a download is written to, at its end, for this process alone."""
        with self._storing():
            self._part(file).parent.mkdir(parents=True, exist_ok=True)
            with self._part(file).open("ab+") as part:
                try:
                    fcntl.flock(part, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise ModelError(f"{file.name} of {self._name} is being fetched by another process") from None
                yield part

    def keep(self, file: RemoteFile) -> None:
        os.replace(self._part(file), self._blob(file))

    def discard(self, file: RemoteFile) -> None:
        self._part(file).unlink(missing_ok=True)

    def finish(self, files: list[RemoteFile]) -> None:
        """Make the files visible by their names, all of them or none that is new."""
        names = Counter(file.checksum for file in files)
        with self._storing():
            for file in files:
                names[file.checksum] -= 1
                if self._blob(file).exists():  # else it was moved to its name
                    self._show(file, last=not names[file.checksum])
            reference = self.folder / "refs" / "main"
            reference.parent.mkdir(parents=True, exist_ok=True)
            reference.write_text(self._commit)

    def _show(self, file: RemoteFile, *, last: bool) -> None:
        """Make a file visible by its name. `last`: of the names with this content."""
        link = self._link(file)
        link.parent.mkdir(parents=True, exist_ok=True)
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)  # of a process that was killed
        try:
            temporary.symlink_to(os.path.relpath(self._blob(file), link.parent))
        except OSError as error:
            if error.errno not in _NO_SYMBOLIC_LINKS:
                raise
            # Like huggingface_hub, move the content there.
            if last:
                os.replace(self._blob(file), temporary)
            else:
                shutil.copyfile(self._blob(file), temporary)
        os.replace(temporary, link)

    @contextlib.contextmanager
    def _storing(self) -> Iterator[None]:
        """Raise `ModelError` for an `OSError`."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise ModelError(f"{self._name} cannot be stored in {self.folder}: {reason}") from error

    def _link(self, file: RemoteFile) -> Path:
        return self.folder / "snapshots" / self._commit / file.name

    def _blob(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / file.checksum

    def _part(self, file: RemoteFile) -> Path:
        return self.folder / "blobs" / (file.checksum + _PART)


class HubClient:
    """Requests about one repository. Raises `ModelError`."""

    def __init__(
        self,
        name: HubName,
        sleep: Callable[[float], None],
        attempts: int = ATTEMPTS,
        *,
        on_wait: Waiting = lambda seconds, reason: None,
    ) -> None:
        import httpx

        if offline():
            raise ModelError(f"{name} is not on this machine, and --offline or HF_HUB_OFFLINE is set")

        self._name = name
        endpoint = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
        self._listing_url = f"{endpoint}/api/models/{name.repository}?blobs=true"
        self._files_url = f"{endpoint}/{name.repository}/resolve"
        token = _token()
        self._has_token = token is not None
        self._client = httpx.Client(
            headers={"User-Agent": "syringa", **({"Authorization": f"Bearer {token}"} if token else {})},
            timeout=httpx.Timeout(30, connect=15),
            follow_redirects=True,  # to the storage of large files, which does not get the token
        )
        self._downloader = Downloader(
            self._client,
            str(name),
            self._explain,
            advice="pull it again to continue",
            attempts=attempts,
            sleep=sleep,
            on_wait=on_wait,
        )

    def __enter__(self) -> HubClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def list(self) -> Listing:
        """Return the files of the repository."""
        body = self._downloader.get(self._listing_url)
        try:
            info = msgspec.json.decode(body, type=_ModelInfo)
            return Listing(info.sha, tuple(map(_remote_file, info.siblings)), _license(info.tags))
        except (msgspec.DecodeError, ValueError) as error:
            raise ModelError(f"{self._name}: the Hub's answer cannot be read: {error}") from error

    def fetch(self, file: RemoteFile, commit: str, part: BinaryIO, progress: Callable[[int], None]) -> bool:
        """Complete a partial file, and return whether it has its checksum."""
        return self._downloader.fetch(self._file_url(file, commit), file, part, progress)

    def read(self, file: RemoteFile, commit: str, size: int) -> bytes:
        """Return the first bytes of a file, `size` of them at most. Its checksum is not compared."""
        return self._downloader.get_beginning(self._file_url(file, commit), min(size, file.size)) if file.size else b""

    def _file_url(self, file: RemoteFile, commit: str) -> str:
        return f"{self._files_url}/{commit}/{quote(file.name)}"

    def _explain(self, response: httpx.Response) -> str:
        repository, status = self._name.repository, response.status_code
        code = response.headers.get("X-Error-Code")
        if code == "GatedRepo":
            advice = "with the account of your access token" if self._has_token else _SET_TOKEN
            return f"{repository} is gated: accept its terms on its page, {advice}"
        if status == 404 and (file := self._requested_file(response)):
            return f"{repository} lists the file {file}, and the Hugging Face Hub does not have it: try again later"
        if status == 404 or code == "RepoNotFound":
            private = "your access token may not read it" if self._has_token else "is private: set HF_TOKEN to read it"
            return f"{repository} is not on the Hugging Face Hub, or {private}"
        if status in (401, 403):
            # The Hub does not tell a missing repository from a private one.
            private = "your access token is not valid for it" if self._has_token else "needs a valid token in HF_TOKEN"
            return f"the Hugging Face Hub refuses {repository} ({status}): it does not exist, or {private}"
        if status == 429:
            advice = "" if self._has_token else ", or set HF_TOKEN"
            return f"the Hugging Face Hub refuses more requests for now (429): try again later{advice}"
        return f"{self._name} could not be fetched: the Hugging Face Hub responded with status {status}"

    def _requested_file(self, response: httpx.Response) -> str | None:
        """Return the name of the file that was asked for, before any redirection; None for the list of files."""
        url = str((*response.history, response)[0].url)
        return unquote(url.removeprefix(self._files_url).split("/", 2)[2]) if url.startswith(self._files_url) else None


class _LargeFile(msgspec.Struct):
    sha256: str


class _Sibling(msgspec.Struct):
    rfilename: str
    size: int = 0
    blobId: str = ""
    lfs: _LargeFile | None = None


class _ModelInfo(msgspec.Struct):
    sha: str
    siblings: list[_Sibling]
    tags: Any = None  # mirrors may lack them

    def __post_init__(self) -> None:
        if not _REVISION.fullmatch(self.sha):
            raise ValueError("the commit is not a hexadecimal number")


def _license(tags: object) -> str | None:
    """Return the license that the tags of a repository name."""
    for tag in tags if isinstance(tags, list) else ():
        if isinstance(tag, str) and tag.startswith(_LICENSE_TAG):
            return tag.removeprefix(_LICENSE_TAG)
    return None


def _remote_file(sibling: _Sibling) -> RemoteFile:
    name, checksum = sibling.rfilename, sibling.lfs.sha256 if sibling.lfs else sibling.blobId
    # Both become parts of paths.
    if not re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", checksum):
        raise ValueError(f"the checksum of {name!r} is not a hexadecimal number")
    if name.startswith("/") or ".." in name.split("/") or "\0" in name:
        raise ValueError(f"the name {name!r} leaves the folder")
    return RemoteFile(name, sibling.size, checksum)
