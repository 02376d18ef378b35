"""Downloads over HTTP that continue where a connection ended, in a later process too."""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from syringa.errors import ModelError

if TYPE_CHECKING:
    import httpx

Progress = Callable[[int, int], None]  # downloaded bytes and total bytes
Waiting = Callable[[float, str], None]  # seconds until the next attempt, and why: a status, or a failed connection

ATTEMPTS = 5

_CHUNK = 1 << 20
_MAX_WAIT = 60.0  # seconds between two attempts
_SUCCESSES = {200, 202, 206}
_RETRIED = {408, 429, 500, 502, 503, 504}


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a repository. `checksum` is SHA-256 for files in large file storage, git's SHA-1 for others."""

    name: str
    size: int
    checksum: str

    @property
    def is_large(self) -> bool:
        return len(self.checksum) == 64


FileProgress = Callable[[RemoteFile, int], None]  # a file, and its downloaded bytes


def progress_from(progress: Progress, done: int, total: int) -> Callable[[int], None]:
    """Return a function that reports the bytes of one file, of which `done` others have come before."""
    return lambda size: progress(min(done + size, total), total)


class Downloader:
    """Sends a request again as long as each attempt has brought bytes, and a few times otherwise."""

    def __init__(
        self,
        client: httpx.Client,
        name: str,
        explain: Callable[[httpx.Response], str],
        *,
        advice: str,
        describe: Callable[[Exception], str] | None = None,
        attempts: int = ATTEMPTS,
        sleep: Callable[[float], None] = time.sleep,
        on_wait: Waiting = lambda seconds, reason: None,
    ) -> None:
        """`name`: what is downloaded, for messages. `attempts`: so many without a byte in between.

        `explain` returns the reason for a status that is no success, and `describe` that for a failed connection.
        `on_wait` is called before each further attempt.
        """
        self._client, self._name, self._advice, self._sleep = client, name, advice, sleep
        self._on_wait = on_wait
        self._explain, self._describe, self._attempts = explain, describe or _first_line, attempts

    def get(self, url: str) -> bytes:
        """Return the content of a URL. Raises `ModelError`."""
        body = b""

        def read(response: httpx.Response) -> None:
            nonlocal body
            body = response.read()

        self._request(url, dict, read, received=lambda: 0)
        return body

    def get_beginning(self, url: str, size: int) -> bytes:
        """Return the first `size` bytes of a file, or all if it has fewer. Raises `ModelError`."""
        beginning = b""

        def read(response: httpx.Response) -> None:
            nonlocal beginning
            beginning = b""
            for chunk in response.iter_raw():
                beginning += chunk
                if len(beginning) >= size:  # of the whole file, from a server that does not know ranges
                    return

        headers = {"Accept-Encoding": "identity", "Range": f"bytes=0-{size - 1}"}
        self._request(url, lambda: headers, read, received=lambda: 0)
        return beginning[:size]

    def fetch(self, url: str, file: RemoteFile, part: BinaryIO, progress: Callable[[int], None]) -> bool:
        """Complete a partial file, opened to read and append. Return whether it has its checksum now.

        `progress` gets the bytes that are there. Raises `ModelError`, and `OSError` if the file cannot be written.
        """
        digest = _start_digest(file, part)
        received = part.tell()

        def write(response: httpx.Response) -> None:
            nonlocal digest, received
            if response.status_code == 200 and received:  # the server does not continue files
                part.truncate(0)
                digest, received = _start_digest(file, part), 0
            for chunk in response.iter_raw():  # as it arrives: of a larger chunk, a cut would lose what has come
                part.write(chunk)
                digest.update(chunk)
                received += len(chunk)
                progress(min(received, file.size))
                if received > file.size:
                    return

        if received < file.size or file.size == 0:
            headers = {"Accept-Encoding": "identity"}
            self._request(
                url,
                lambda: headers | ({"Range": f"bytes={received}-"} if received else {}),
                write,
                received=lambda: received,
            )
        part.flush()
        os.fsync(part.fileno())
        return received == file.size and digest.hexdigest() == file.checksum

    def _request(
        self,
        url: str,
        headers: Callable[[], dict[str, str]],
        read: Callable[[httpx.Response], None],
        received: Callable[[], int],
    ) -> None:
        """Send a GET until a response was read whole."""
        import httpx

        attempt, reached = 0, received()
        while True:
            wait = float(2**attempt)
            try:
                with self._client.stream("GET", url, headers=headers()) as response:
                    if response.status_code in _SUCCESSES:
                        read(response)
                        return
                    if response.status_code in _RETRIED:
                        wait = _retry_after(response) or wait
                    failure, short = self._explain(response), str(response.status_code)
                    if response.status_code not in _RETRIED:
                        raise ModelError(failure)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = self._describe(error)
                short = "the connection failed"
                failure = f"{self._name} could not be fetched: the connection failed ({reason}); {self._advice}"
            attempt = 1 if received() > reached else attempt + 1
            reached = max(reached, received())
            if attempt >= self._attempts:
                raise ModelError(failure)
            self._on_wait(min(wait, _MAX_WAIT), short)
            self._sleep(min(wait, _MAX_WAIT))


def _start_digest(file: RemoteFile, part: BinaryIO) -> Any:
    """Return the digest of what is in a partial file, whose position is its end afterwards."""
    digest = hashlib.sha256() if file.is_large else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    part.seek(0)
    while chunk := part.read(_CHUNK):
        digest.update(chunk)
    return digest


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the server asks to wait; None if it does not say, or not as a number of seconds."""
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
