"""How a machine joins a cluster: it verifies the server by the join token, and gets its certificates for it."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from syringa.cluster.admission import JoinAnswer, JoinRequest
from syringa.cluster.folder import RAY_FOLDER, RAY_TOKEN, ClusterFolder, replace_file, replace_files
from syringa.cluster.join_tokens import parse_token
from syringa.cluster.tls import client_context, describe_tls_error
from syringa.errors import ConfigError

DEFAULT_PORT = 8470
MEMBERSHIP = "node.json"
TIMEOUT_SECONDS = 20.0
START_SECONDS = 15.0  # for a server that is just being started
POLL_SECONDS = 0.2

_MAX_ANSWER = 1 << 20  # bytes
_REQUIRED = ("ca.pem", "server.pem", "server.key", "node.pem", "node.key")
_OPTIONAL = (f"{RAY_FOLDER}/ca.pem", f"{RAY_FOLDER}/node.pem", f"{RAY_FOLDER}/node.key", RAY_TOKEN)


class Membership(msgspec.Struct, frozen=True):
    """What a node knows of its cluster, beside its certificates."""

    name: str
    server: str  # host:port
    ray_port: int = 0  # of Ray's head, on the host of the server; 0: without Ray


class ServerAddress(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_server_address(text: str, *, listening: bool = False) -> ServerAddress:
    """Return the parts of HOST or HOST:PORT, with an IPv6 address in brackets. Raises `ConfigError`.

    `listening`: port 0 is allowed, which means one that is free.
    """
    host, separator, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not separator:
        host, port = text, str(DEFAULT_PORT)
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    valid = host and host.isprintable() and not set(host) & set(" /@") and port.isascii() and port.isdigit()
    if not valid or not (0 if listening else 1) <= int(port) < 1 << 16:
        raise ConfigError(f"the address {text!r}: expected HOST or HOST:PORT of the cluster's server")
    return ServerAddress(host, int(port))


def read_membership(folder: Path) -> Membership | None:
    """Return the membership of the node with this folder; None on the machine of the server. Raises `ConfigError`."""
    path = folder / MEMBERSHIP
    try:
        return msgspec.json.decode(path.read_bytes(), type=Membership)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def join(address: str, token: str, folder: Path, *, name: str, hosts: Sequence[str] = ()) -> Membership:
    """Join the cluster whose server is at an address, and store the certificates of this node in a new folder.

    `hosts`: names and addresses under which API servers reach this machine, beside the address from which it reaches
    the server. Raises `ConfigError`; the folder is created whole or not at all.
    """
    server, parsed = parse_server_address(address), parse_token(token)
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ConfigError(f"{folder}: there is something already, which is not overwritten")
    authority = _authority(server, parsed.fingerprint)
    own = _own_address(server)
    request = JoinRequest(parsed.secret, name, tuple(dict.fromkeys([*hosts, *own])))
    context = _verifying_context(authority)
    content = _request(server, context, "POST", "/join", msgspec.json.encode(request))
    answer = _decode(server, content)
    membership = Membership(name, str(server), answer.ray_port)
    _create(folder, answer.files, membership)
    return membership


def renew(folder: Path) -> Membership:
    """Replace the certificates of this node by new ones, which the server issues. Raises `ConfigError`."""
    membership = read_membership(folder)
    if membership is None:
        raise ConfigError(f"{folder}: this machine has not joined a cluster")
    server = parse_server_address(membership.server)
    context = client_context(ClusterFolder(folder).files("node"))
    answer = _decode(server, _request(server, context, "POST", "/renew", b""))
    try:
        _write(folder, answer.files)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from None
    return membership


def _authority(server: ServerAddress, fingerprint: bytes) -> str:
    """Return the certificate of the server's authority, PEM, if it is that of the token. Nothing secret is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # the answer is verified
    content = _request(server, context, "GET", "/ca", patience=START_SECONDS)
    try:
        pem = content.decode("ascii")
        der = ssl.PEM_cert_to_DER_cert(pem)
    except ValueError:
        raise ConfigError(f"{server} is not the server of a cluster") from None
    if hashlib.sha256(der).digest() != fingerprint:
        raise ConfigError(
            f"{server} is not the server that the join token is for: its authority has another fingerprint; "
            "the token was not sent"
        )
    return ssl.DER_cert_to_PEM_cert(der)  # this certificate and nothing else


def _verifying_context(authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=authority)
    return context


def _request(
    server: ServerAddress,
    context: ssl.SSLContext,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    patience: float = 0.0,
) -> bytes:
    """Return the content of a successful response. Raises `ConfigError`.

    `patience`: for how many seconds to try again while the server refuses connections.
    """
    deadline = time.monotonic() + patience
    connection = http.client.HTTPSConnection(server.host, server.port, timeout=TIMEOUT_SECONDS, context=context)
    try:
        while True:
            try:
                connection.connect()
                break
            except ConnectionRefusedError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_SECONDS)
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = connection.getresponse()
        content = response.read(_MAX_ANSWER)
    except socket.gaierror as error:
        raise ConfigError(f"{server} cannot be reached: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"{server} cannot be reached: {describe_tls_error(error)}") from None
    except http.client.HTTPException:
        raise ConfigError(f"{server} is not the server of a cluster") from None
    finally:
        connection.close()
    if response.status != 200:
        raise ConfigError(f"{server} refuses: {error_message(content) or f'status {response.status}'}")
    return content


def error_message(content: bytes) -> str:
    """Return the message in the body of an error of the server; empty if there is none."""
    with contextlib.suppress(msgspec.DecodeError):
        error = msgspec.json.decode(content, type=dict[str, dict[str, str | None]])
        return str(error.get("error", {}).get("message") or "")
    return ""


def _own_address(server: ServerAddress) -> list[str]:
    """Return the address from which this machine reaches the server."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # chooses a route; nothing is sent
            return [str(probe.getsockname()[0]).partition("%")[0]]
    return []


def _decode(server: ServerAddress, content: bytes) -> JoinAnswer:
    try:
        answer = msgspec.json.decode(content, type=JoinAnswer)
    except msgspec.DecodeError:
        raise ConfigError(f"{server} is not the server of a cluster") from None
    if not set(_REQUIRED) <= set(answer.files) <= {*_REQUIRED, *_OPTIONAL}:
        raise ConfigError(f"{server} sent other files than expected: it may be of another version")
    return answer


def _create(folder: Path, files: Mapping[str, str], membership: Membership) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))  # of mode 0700
        try:
            _write(new, files)
            replace_file(new / MEMBERSHIP, msgspec.json.encode(membership))
            new.rename(folder)  # fails if another process has just done the same
        finally:
            shutil.rmtree(new, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made: {error.strerror}") from None


def _write(folder: Path, files: Mapping[str, str]) -> None:
    contents = {folder / name: content.encode() for name, content in files.items()}
    for path in contents:
        path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_files([(path, content, 0o644 if path.suffix == ".pem" else 0o600) for path, content in contents.items()])
