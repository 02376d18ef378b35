"""The browser console: its static files, which are public, and the page at `/`.

The files say nothing about the server. What the console shows it reads from the API, with the key of its user.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

import syringa.console
from syringa.config import Config
from syringa.errors import NotFound
from syringa.http.context import request_context

STATIC = Path(syringa.console.__file__).with_name("static")
INDEX = "index.html"

# The media types of the files. Others are not served.
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".webp": "image/webp",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
}
_COMPRESSED = frozenset({".html", ".js", ".css", ".json", ".txt", ".svg"})
_SMALLEST_COMPRESSED = 512  # bytes; fewer gain nothing
_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # neither hidden nor private files, nor a parent folder

_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept by the browser, and asked for again: an upgrade shows at once
    "vary": "accept-encoding",
}


class _File(NamedTuple):
    version: tuple[int, int]  # modification time and size: a file that is edited is read again
    media_type: str
    content: bytes
    compressed: bytes | None
    digest: str


class ConsoleFiles:
    """The files of a folder by their relative paths, read and compressed when they are first asked for."""

    def __init__(self, folder: Path = STATIC) -> None:
        self._folder = folder
        self._files: dict[str, _File] = {}

    async def find(self, path: str) -> _File | None:
        """Return a file; None if there is none, or it is not one of the console."""
        known = self._files.get(path)
        file = self._folder / path if known is not None else self._locate(path)
        if file is None:
            return None
        try:
            stat = file.stat()
            version = (stat.st_mtime_ns, stat.st_size)
            if known is None or known.version != version:
                known = self._files[path] = await asyncio.to_thread(_read, file, version)
        except OSError:
            self._files.pop(path, None)
            return None
        return known

    def _locate(self, path: str) -> Path | None:
        if not all(_SEGMENT.fullmatch(segment) for segment in path.split("/")):
            return None
        file = self._folder / path
        is_served = file.suffix in MEDIA_TYPES and file.is_file()
        return file if is_served and file.resolve().is_relative_to(self._folder.resolve()) else None


class ConsoleRoutes:
    """The console, if it is switched on, and the answer to clients that only ask whether there is a server."""

    def __init__(self, config: Config, files: ConsoleFiles | None = None) -> None:
        self._enabled, self._ollama_port = config.console, config.ollama_port
        self._files = files or ConsoleFiles()

    async def index(self, request: Request) -> Response:
        """Respond with the console's page; as text without it, and on Ollama's port.

        Some clients ask for nothing but whether there is a server, such as Claude Code with `HEAD /`.
        """
        connection = request_context(request.scope).connection
        if connection is not None and connection.local_port() == self._ollama_port:
            return Response("Ollama is running", media_type="text/plain")
        found = await self._files.find(INDEX) if self._enabled else None
        if found is None:
            return Response("Syringa is running\n", media_type="text/plain")
        return _respond(request, found)

    async def file(self, request: Request) -> Response:
        path: str = request.path_params["path"]
        if self._enabled and not path:
            return RedirectResponse("../", headers=HEADERS)  # relative: a proxy may serve it below another path
        found = await self._files.find(path) if self._enabled else None
        if found is None:
            raise NotFound(f"There is no file {path!r:.200} of the console.", code="file_not_found")
        return _respond(request, found)


def _read(file: Path, version: tuple[int, int]) -> _File:
    content = file.read_bytes()
    compressed = None
    if file.suffix in _COMPRESSED and len(content) >= _SMALLEST_COMPRESSED:
        compressed = gzip.compress(content, mtime=0)
    return _File(version, MEDIA_TYPES[file.suffix], content, compressed, hashlib.sha256(content).hexdigest()[:24])


def _respond(request: Request, file: _File) -> Response:
    compressed = file.compressed if _accepts_gzip(request.headers.get("accept-encoding", "")) else None
    etag = f'"{file.digest}-gz"' if compressed is not None else f'"{file.digest}"'
    headers = HEADERS | {"etag": etag}
    if _matches(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers=headers)
    if compressed is not None:
        headers["content-encoding"] = "gzip"
    content = file.content if compressed is None else compressed
    return Response(content, headers=headers, media_type=file.media_type)


def _accepts_gzip(header: str) -> bool:
    for each in header.lower().split(","):
        coding, _, weight = (part.strip() for part in each.partition(";"))
        if coding in ("gzip", "*"):
            return weight.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _matches(header: str, etag: str) -> bool:
    """Whether `If-None-Match` names the version that would be sent."""
    tags = (each.strip().removeprefix("W/") for each in header.split(","))
    return header.strip() == "*" or etag in tags
