"""Helpers of tests that connect to hosts: names that resolve to chosen addresses, and certificates."""

from __future__ import annotations

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest


def patch_resolver(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> list[str]:
    """Make names resolve to addresses, one list per lookup, and return the list of lookups."""
    looked_up: list[str] = []

    def getaddrinfo(host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        looked_up.append(host)
        if host not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return looked_up


def certificate(folder: Path, name: str) -> Path:
    """Return a file with a key and a self-signed certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout a.pem -out b.pem"
    )
    options = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    subprocess.run([*command.split(), *options], cwd=folder, check=True, capture_output=True)
    file = folder / "both.pem"
    file.write_bytes((folder / "a.pem").read_bytes() + (folder / "b.pem").read_bytes())
    return file
