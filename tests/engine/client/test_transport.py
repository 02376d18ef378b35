from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from syringa.cluster.tls import TlsFiles
from syringa.engine.client.transport import Address, listen, parse_address
from syringa.errors import ConfigError
from tests.cluster.certificates import Certificates


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/a:b.sock", Address("unix", "/run/a:b.sock")),
        ("tcp:10.0.0.7:4000", Address("tcp", "10.0.0.7", 4000)),
        ("tcp:node-1.example:0", Address("tcp", "node-1.example", 0)),
        ("tcp:[::1]:65535", Address("tcp", "::1", 65535)),
    ],
)
def test_address_is_parsed_and_written_alike(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "unix:", "unix:a\0b", "/run/a.sock", "tcp:", "tcp:host", "tcp:host:", "tcp::80", "tcp:host:65536",
        "tcp:host:-1", "tcp:host:٣", "tcp:::1:80", "tcp:[]:80", "http:host:80",
    ],
)  # fmt: skip
def test_address_that_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected unix:PATH or tcp:HOST:PORT"):
        parse_address(text)


def test_unix_listener_is_accessible_to_the_owner_only(tmp_path: Path) -> None:
    listener = listen(f"unix:{tmp_path}/a.sock")
    assert listener.address == Address("unix", f"{tmp_path}/a.sock")
    assert stat.S_IMODE(os.stat(tmp_path / "a.sock").st_mode) == 0o600
    listener.close()


def test_tcp_listener_needs_certificates(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="only with the certificates of a cluster"):
        listen("tcp:127.0.0.1:0")
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(ConfigError, match=r"missing\.pem: No such file"):
        listen("tcp:127.0.0.1:0", TlsFiles(missing, missing, missing))


def test_listener_reports_an_address_that_cannot_be_used(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at tcp:127.0.0.1:{port}: Address already in use"):
            listen(f"tcp:127.0.0.1:{port}", certificates.server)
    with pytest.raises(ConfigError, match="cannot listen at unix:"):
        listen(f"unix:{tmp_path}/missing/a.sock")
