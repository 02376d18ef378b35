"""The folder with the certificates of a cluster, as `syringa cluster init` makes it.

The folder is accessible to its owner only, and so is each key. Everything but the keys of the authorities may be copied
to other machines; those keys are needed to issue certificates, and nowhere else.

Ray has an authority of its own, in ray/: its certificates are those of a server and of a client at once, and workers
would take such a certificate of the first authority for that of an API server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from syringa.cluster.authority import CertificateAuthority, KeyPair, Role, hosts_of
from syringa.cluster.tls import TlsFiles, client_context, server_context
from syringa.errors import ConfigError

AUTHORITY = "ca"
RAY_FOLDER = "ray"
RAY_TOKEN = "ray.token"  # which Ray requires of every connection
ROLES: tuple[Role, ...] = ("server", "client")


class ClusterFolder:
    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self, role: Role) -> TlsFiles:
        """Return the files with which a process of this machine takes a role."""
        certificate, key = self._paths(role)
        return TlsFiles(ca=str(self._paths(AUTHORITY)[0]), certificate=str(certificate), key=str(key))

    def ray_files(self) -> TlsFiles:
        """Return the files with which Ray on this machine serves and connects."""
        return ClusterFolder(self.path / RAY_FOLDER).files("node")

    @property
    def ray_address(self) -> Path:
        """The file with the address of Ray's head, on the machine that has started it."""
        return self.path / "ray.address"

    @property
    def ray_token(self) -> Path:
        return self.path / RAY_TOKEN

    def check_ray(self) -> None:
        """Raise `ConfigError` if the certificate or the token of Ray cannot be used."""
        client_context(self.ray_files())
        try:
            empty = not self.ray_token.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{self.ray_token}: {error.strerror}; `syringa cluster init` makes it") from None
        if empty:
            raise ConfigError(f"{self.ray_token}: this file is empty; `syringa cluster init` makes it")

    def check(self) -> None:
        """Raise `ConfigError` if the files of a role cannot be used."""
        server_context(self.files("server"))
        client_context(self.files("client"))

    def create(self, name: str, hosts: Sequence[str], *, now: datetime | None = None) -> CertificateAuthority:
        """Make an authority and a certificate per role for the node `name`, all or nothing. Raises `ConfigError`.

        A folder that exists has to be empty: certificates are never overwritten.
        """
        if self.path.exists() and not (self.path.is_dir() and not any(self.path.iterdir())):
            raise ConfigError(f"{self.path}: there is something already, which is not overwritten")
        authority = CertificateAuthority.create(now=now)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = Path(tempfile.mkdtemp(prefix=f".{self.path.name}-", dir=self.path.parent))  # of mode 0700
            try:
                folder = ClusterFolder(new)
                folder._write(AUTHORITY, authority.pem())
                folder._issue(authority, name, hosts, now)
                folder._create_ray(name, hosts, now)
                new.rename(self.path)  # fails if another process has just done the same
            finally:
                shutil.rmtree(new, ignore_errors=True)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be made: {error.strerror}") from None
        return authority

    def authority(self) -> CertificateAuthority:
        """Return the authority, on the machine that has its key. Raises `ConfigError`."""
        try:
            return CertificateAuthority.load(*(path.read_bytes() for path in self._paths(AUTHORITY)))
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            raise ConfigError(f"{reason}; `syringa cluster init` makes the certificates") from None

    def renew(self, name: str, *, now: datetime | None = None) -> CertificateAuthority:
        """Replace the certificates of this node by new ones with the same hosts. Raises `ConfigError`."""
        authority = self.authority()
        try:
            hosts = hosts_of(self._paths("server")[0].read_bytes())
            self._issue(authority, name, hosts, now)
            ray = ClusterFolder(self.path / RAY_FOLDER)
            if ray.path.exists():
                ray._issue_ray(ray.authority(), name, hosts, now)
            else:  # of a version without Ray
                self._create_ray(name, hosts, now)
        except OSError as error:
            reason = f"{error.filename}: {error.strerror}"
            raise ConfigError(f"{reason}; `syringa cluster init` makes the certificates") from None
        except ValueError:
            raise ConfigError(f"{self._paths('server')[0]}: not a certificate") from None
        return authority

    def _issue(self, authority: CertificateAuthority, name: str, hosts: Sequence[str], now: datetime | None) -> None:
        for role in ROLES:
            pair = authority.issue(name, roles={role}, hosts=hosts if role == "server" else (), now=now)
            self._write(role, pair)

    def _create_ray(self, name: str, hosts: Sequence[str], now: datetime | None) -> None:
        authority = CertificateAuthority.create(now=now)
        ray = ClusterFolder(self.path / RAY_FOLDER)
        ray.path.mkdir(mode=0o700)
        ray._write(AUTHORITY, authority.pem())
        ray._issue_ray(authority, name, hosts, now)
        replace_file(self.ray_token, secrets.token_hex(32).encode())

    def _issue_ray(
        self, authority: CertificateAuthority, name: str, hosts: Sequence[str], now: datetime | None
    ) -> None:
        self._write("node", authority.issue(name, roles={"server", "client"}, hosts=hosts, now=now))

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self.path / f"{name}.pem", self.path / f"{name}.key"

    def _write(self, name: str, pair: KeyPair) -> None:
        certificate, key = self._paths(name)
        replace_files([(key, pair.key, 0o600), (certificate, pair.certificate, 0o644)])


def replace_file(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file that has its mode from the first byte on, and that readers see whole."""
    replace_files([(path, content, mode)])


def replace_files(files: Sequence[tuple[Path, bytes, int]]) -> None:
    """Write files, given with their modes, like `replace_file`: all of them first, then they are put in their places.

    Readers see some of the old ones with some of the new ones for a moment only.
    """
    written: list[tuple[Path, Path]] = []
    for path, content, mode in files:
        temporary = path.with_name(f".{path.name}.new")
        temporary.unlink(missing_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(fd, "wb") as out:
            os.fchmod(fd, mode)  # whatever the umask
            out.write(content)
            out.flush()
            os.fsync(fd)
        written.append((temporary, path))
    for temporary, path in written:
        temporary.replace(path)
