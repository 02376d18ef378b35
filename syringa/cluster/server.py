"""The server of a cluster, HTTPS with certificates of its authority.

| request | client | response |
| --- | --- | --- |
| GET /ca | any | the authority's certificate, which a machine compares with its join token |
| POST /join | any with a join token | certificates of a new node |
| POST /renew | a node | new certificates of the node |
| GET /models/{digest}/manifest | a node | the files of a model; 202 while their checksums are computed |
| GET /models/{digest}/files/{name} | a node | a file, or a range of it |

Each connection has a thread. Clients that are not verified have little time, and give way to others.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec

from syringa.cluster.admission import JoinRequest, NodeAdmission, peer_address
from syringa.cluster.connection_limits import ConnectionTable, FailureLimiter
from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join import ServerAddress
from syringa.cluster.manifest import ManifestPending
from syringa.cluster.served_models import ServedModels
from syringa.cluster.tls import TlsFiles, WrongRole, check_role, describe_tls_error, server_context
from syringa.errors import ConfigError, Forbidden, InvalidRequest, NotFound, RateLimited, SyringaError, Unauthorized

logger = logging.getLogger("syringa.cluster")

POLL_SECONDS = 0.5
IDLE_SECONDS = 60.0  # of a node's connection, between requests and while nothing of a response is taken
MANIFEST_SECONDS = 5.0  # that a request for a manifest waits for checksums
MAX_BODY = 1 << 14  # bytes
ACCEPT_RETRY_SECONDS = 0.1  # after an error such as too many open files

_CHUNK = 1 << 20
_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
_MODEL = re.compile(r"/models/([0-9a-f]{32})/(manifest|files/([^/]+))")


class TooManyConnections(SyringaError):
    """A node has as many connections as it may. It is to try again later."""

    status = 503
    code = "too_many_connections"
    retry_after = 2.0


def _node_required(message: str) -> Forbidden:
    return Forbidden(message, code="node_certificate_required")


class ClusterServer(ThreadingHTTPServer):
    """Use `serve_forever` and `shutdown`; then `server_close`."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: ServerAddress,
        folder: Path,
        models: ServedModels,
        *,
        ray_port: int = 0,
        connections: ConnectionTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`folder`: that of the cluster. Port 0: one that is free. Raises `ConfigError`."""
        self.models, self.admission = models, NodeAdmission(folder, ray_port=ray_port)
        self.connections = ConnectionTable(clock) if connections is None else connections
        self.failures = FailureLimiter(clock)
        self.authority = ClusterFolder(folder).authority().pem().certificate
        self._tls = _ReloadingContext(ClusterFolder(folder).files("server"))
        try:
            family, _, _, _, name = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__(name[:2], _Handler)  # type: ignore[arg-type]
        except OSError as error:
            raise ConfigError(f"the cluster's server cannot listen at {address}: {error.strerror}") from None
        self.address = ServerAddress(address.host, self.server_address[1])

    def server_bind(self) -> None:
        """Like the overridden method, without a lookup of the host's name, which may take long."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def get_request(self) -> Any:
        try:
            return super().get_request()
        except OSError as error:
            logger.error("cluster: a connection cannot be accepted: reason=%r", error.strerror)
            time.sleep(ACCEPT_RETRY_SECONDS)
            raise

    def service_actions(self) -> None:
        self.connections.expire()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.connections.add(request, peer_address(client_address[0])):
            logger.warning("cluster: connection refused: peer=%s reason='too many connections'", client_address[0])
            request.close()
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection, in a thread of its own."""
        connection = request
        try:
            request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request.settimeout(IDLE_SECONDS)
            connection = self._tls.context().wrap_socket(request, server_side=True, do_handshake_on_connect=False)
            if not self.connections.replace(request, connection):
                return
            try:
                connection.do_handshake()
            except OSError as error:
                reason = describe_tls_error(error)
                logger.warning("cluster: connection refused: peer=%s reason=%r", client_address[0], reason)
                return
            _Handler(connection, client_address, self)
        except OSError as error:
            logger.info("cluster: connection ended: peer=%s reason=%r", client_address[0], describe_tls_error(error))
        except Exception:
            logger.exception("cluster: connection failed: peer=%s", client_address[0])
        finally:
            self.connections.remove(connection)
            connection.close()

    def server_close(self) -> None:
        super().server_close()
        self.connections.end_all()


class _ReloadingContext:
    """The TLS context of the server, made again when the certificates are renewed."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._context, self._modified = server_context(files, anonymous=True), files.modified()

    def context(self) -> ssl.SSLContext:
        with self._lock, contextlib.suppress(OSError):
            modified = self._files.modified()
            if modified != self._modified:
                self._modified = modified
                try:
                    self._context = server_context(self._files, anonymous=True)
                except ConfigError as error:
                    logger.error("cluster: renewed certificates are not used: reason=%r", error.message)
        return self._context


class _Handler(BaseHTTPRequestHandler):
    """The requests of one connection."""

    server: ClusterServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "syringa", ""

    def setup(self) -> None:
        super().setup()
        self.peer = peer_address(self.client_address[0])
        certificate = self.connection.getpeercert()
        self.node, self.serial = "", ""
        self.refusal: SyringaError = _node_required(
            "this needs the certificate of a node: `syringa cluster join` gets one"
        )
        if certificate:
            try:
                self.node, self.serial = check_role(certificate, "node"), str(certificate["serialNumber"])
            except WrongRole:
                self.refusal = _node_required("the certificate of this client is not that of a node")
        if self.node and not self.server.connections.verify(self.connection, self.node):
            self.refusal, self.node = TooManyConnections(f"the node {self.node} has too many connections"), ""

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def _answer(self, handle: Callable[[], None]) -> None:
        if not self.node:
            self.close_connection = True
        try:
            handle()
        except SyringaError as error:
            message = error.message
            if isinstance(error, ConfigError):
                logger.error("cluster: request failed: path=%r reason=%r", self.path[:200], message)
                message = "the files of the cluster cannot be used: see the log of its server"
            elif error.status in (401, 403, 429, 503):
                logger.warning(
                    "cluster: request refused: peer=%s path=%r reason=%r", self.peer, self.path[:200], message
                )
            headers = {"Retry-After": f"{math.ceil(error.retry_after)}"} if error.retry_after else {}
            self._send_error(error.status, message, error.code, headers)

    def _get(self) -> None:
        if self.path == "/ca":
            self._send(HTTPStatus.OK, "application/x-pem-file", self.server.authority)
            return
        match = _MODEL.fullmatch(self.path)
        if match is None:
            raise NotFound("no such path")
        self._require_node()
        if match[2] == "manifest":
            manifest = self.server.models.manifest(match[1], MANIFEST_SECONDS)
            pending = isinstance(manifest, ManifestPending)
            self._send_json(manifest, HTTPStatus.ACCEPTED if pending else HTTPStatus.OK)
        else:
            self._send_file(match[1], unquote(match[3]))

    def _post(self) -> None:
        if self.path == "/renew":
            self._require_node()
            self._read_body()
            self._send_json(self.server.admission.renew(self.node, self.serial))
        elif self.path == "/join":
            if wait := self.server.failures.wait_seconds(self.peer):
                raise RateLimited("too many attempts with wrong join tokens", retry_after=wait)
            try:
                request = msgspec.json.decode(self._read_body(), type=JoinRequest)
            except (msgspec.DecodeError, RecursionError):
                raise InvalidRequest("expected JSON with secret, name and hosts") from None
            try:
                answer = self.server.admission.admit(request, self.peer)
            except Unauthorized:
                self.server.failures.record(self.peer)
                raise
            self._send_json(answer)
        else:
            raise NotFound("no such path")

    def _require_node(self) -> None:
        if not self.node:
            raise self.refusal

    def _read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY:
            raise InvalidRequest(f"expected a body with a Content-Length of at most {MAX_BODY}")
        body = self.rfile.read(int(length))
        if len(body) != int(length):
            raise ConnectionError("the connection ended within a request")
        return body

    def _send_file(self, digest: str, name: str) -> None:
        served = self.server.models.open(digest, name)
        with served.file as file:
            start, end = 0, served.size
            requested = _RANGE.fullmatch(self.headers.get("Range", ""))
            if requested:
                start = int(requested[1])
                end = min(int(requested[2]) + 1, served.size) if requested[2] else served.size
                if start >= end:
                    self._send(
                        HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "text/plain", b"",
                        {"Content-Range": f"bytes */{served.size}"},
                    )  # fmt: skip
                    return
            self.send_response(HTTPStatus.PARTIAL_CONTENT if requested else HTTPStatus.OK)
            self.send_header("Content-Type", "application/octet-stream")
            self.send_header("Content-Length", str(end - start))
            self.send_header("ETag", f'"{served.sha256}"')
            self.send_header("Accept-Ranges", "bytes")
            if requested:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{served.size}")
            self.end_headers()
            file.seek(start)
            while start < end:
                chunk = file.read(min(_CHUNK, end - start))
                if not chunk:
                    raise ConnectionAbortedError(f"{name} was truncated while it was sent")
                self.wfile.write(chunk)
                start += len(chunk)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Respond to a request that is no HTTP, or has a method that no path has."""
        self._send_error(code, message or HTTPStatus(code).phrase, "invalid_request")

    def _send_error(self, status: int, message: str, code: str | None, headers: dict[str, str] | None = None) -> None:
        self.close_connection = True  # the body of the request may not have been read
        self._send_json({"error": {"message": message, "code": code}}, status, headers)

    def _send_json(self, value: object, status: int = HTTPStatus.OK, headers: dict[str, str] | None = None) -> None:
        self._send(status, "application/json", msgspec.json.encode(value), headers)

    def _send(self, status: int, kind: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("cluster: peer=%s node=%s message=%r", self.client_address[0], self.node, format % args)
