"""Certificates for tests: of the cluster, and of all kinds that it refuses."""

from __future__ import annotations

import functools
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from syringa.cluster.authority import CertificateAuthority, Role
from syringa.cluster.tls import TlsFiles

PAST = datetime(2020, 1, 1, tzinfo=UTC)


class Certificates:
    """A cluster's authority, and files with certificates of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.authority = CertificateAuthority.create()
        self.ca = folder / "ca.pem"
        self.ca.write_bytes(self.authority.pem().certificate)

    def files(
        self, name: str, roles: Collection[Role], *, hosts: tuple[str, ...] = ("127.0.0.1",), **issue: Any
    ) -> TlsFiles:
        return self.write(name, self.authority, roles, hosts=hosts, **issue)

    def write(self, name: str, authority: CertificateAuthority, roles: Collection[Role], **issue: Any) -> TlsFiles:
        """Issue a certificate of any authority. It is used with the authority of this cluster."""
        pair = authority.issue(name, roles=roles, **issue)
        certificate, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        certificate.write_bytes(pair.certificate)
        key.touch(mode=0o600)
        key.write_bytes(pair.key)
        return TlsFiles(ca=str(self.ca), certificate=str(certificate), key=str(key))

    @functools.cached_property
    def server(self) -> TlsFiles:
        return self.files("server", {"server"})

    @functools.cached_property
    def client(self) -> TlsFiles:
        return self.files("client", {"client"})

    @functools.cached_property
    def node(self) -> TlsFiles:
        return self.files("node", {"node"}, hosts=())

    def refused(self, kind: str, role: Role) -> TlsFiles:
        """Return files that the other side of a connection refuses in this role."""
        other: Role = "client" if role == "server" else "server"
        match kind:
            case "expired":
                return self.files(f"expired-{role}", {role}, days=1, now=PAST)
            case "foreign":
                foreign = CertificateAuthority.create()
                return self.write(f"foreign-{role}", foreign, {role}, hosts=("127.0.0.1",))
            case "wrong role":
                return self.files(f"wrong-{role}", {other})
            case "node":
                return self.files(f"node-{role}", {"node"})
            case "other host":
                return self.files(f"other-{role}", {role}, hosts=("elsewhere.example", "127.0.0.2"))
        raise AssertionError(kind)
