"""A server that speaks as much of the Hugging Face Hub's API as a download needs, and fails as it is told to."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c0ffee" + "0" * 34
LARGE = 1024  # bytes from which a file is listed with its SHA-256
PIECE, PIECE_SECONDS = 1 << 20, 3.0  # of a file that comes slowly


class FakeHub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.tags: Any = []  # of all repositories
        self.sizes: dict[str, int] = {}  # of files that are listed with another size than they have
        self.missing: set[str] = set()  # files that are listed and not there
        self.corrupt: set[str] = set()  # files that are sent with other bytes than those listed
        self.cut_after: dict[str, list[int]] = {}  # file → bytes after which each connection is cut
        self.slow_after: dict[str, int] = {}  # file → bytes after which it comes slowly, until `released` is set
        self.released = threading.Event()
        self.statuses: list[int] = []  # of the next responses, instead of content
        self.retry_after: str | None = None  # header of those responses
        self.ignores_ranges = False
        self.token: str | None = None  # that every request needs
        self.gated: str | None = None  # token of an account that has accepted the terms of all models
        self.storage: str | None = None  # URL of a server that files are redirected to
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.authorizations: list[str | None] = []  # of the requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that has read enough closes its connection
            super().handle_error(request, client_address)

    def fetched(self) -> set[str]:
        return {path.partition(f"/resolve/{COMMIT}/")[2] for method, path, _ in self.requests if method == "GET"} - {""}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    server = FakeHub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._respond()

    def do_GET(self) -> None:
        self._respond()

    def _respond(self) -> None:
        server, path = self.server, self.path.partition("?")[0]
        server.requests.append((self.command, path, self.headers.get("Range")))
        server.authorizations.append(self.headers.get("Authorization"))
        if server.statuses:
            wait = {"Retry-After": server.retry_after} if server.retry_after is not None else None
            return self._send(server.statuses.pop(0), b"{}", wait)
        if server.token and self.headers.get("Authorization") != f"Bearer {server.token}":
            return self._send(401, b"{}", {"X-Error-Message": "Invalid credentials"})
        if path.startswith("/api/models/"):
            repository = path.removeprefix("/api/models/")
            return self._send_listing(repository)
        if server.gated and self.headers.get("Authorization") != f"Bearer {server.gated}":
            code = {"X-Error-Code": "GatedRepo"}
            return self._send(403 if self.headers.get("Authorization") else 401, b"{}", code)
        repository, _, file = path[1:].partition(f"/resolve/{COMMIT}/")
        if server.storage is not None and file:
            return self._send(302, b"", {"Location": server.storage + self.path})
        content = server.repositories.get(repository, {}).get(file)
        if content is None or file in server.missing:
            return self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
        return self._send_file(file, content)

    def _send_listing(self, repository: str) -> None:
        files = self.server.repositories.get(repository)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        siblings = [
            {
                "rfilename": name,
                "size": self.server.sizes.get(name, len(content)),
                "blobId": git_blob(content),
                **(
                    {"lfs": {"sha256": sha256(content), "size": len(content), "pointerSize": 130}}
                    if len(content) >= LARGE
                    else {}
                ),
            }
            for name, content in files.items()
        ]
        body = {
            "id": repository,
            "sha": COMMIT,
            "siblings": siblings,
            "tags": self.server.tags,
            "private": False,
            "downloads": 0,
        }
        return self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _send_file(self, file: str, content: bytes) -> None:
        etag = sha256(content) if len(content) >= LARGE else git_blob(content)
        if file in self.server.corrupt:
            content = bytes(byte ^ 1 for byte in content)
        wanted = None if self.server.ignores_ranges else self.headers.get("Range")
        first, _, last = (wanted or "bytes=0-").removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last or len(content) - 1), len(content) - 1)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
        cuts = self.server.cut_after.get(file)
        cut = cuts.pop(0) if cuts and self.command == "GET" else None
        slow = self.server.slow_after.get(file)
        return self._send(206 if wanted else 200, content[start : end + 1], headers, cut, slow)

    def _send(
        self,
        status: int,
        body: bytes,
        headers: dict[str, str] | None = None,
        cut: int | None = None,
        slow: int | None = None,
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        while slow is not None and slow < len(body) and not self.server.released.is_set():
            self.wfile.write(body[:slow])
            body, slow = body[slow:], PIECE
            self.server.released.wait(PIECE_SECONDS)
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
