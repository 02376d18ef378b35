from __future__ import annotations

import shutil
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from syringa.cluster import tls
from syringa.cluster.authority import CertificateAuthority, expiry, hosts_of
from syringa.cluster.folder import ClusterFolder, replace_file, replace_files
from syringa.cluster.tls import client_context, server_context
from syringa.errors import ConfigError

NOW = datetime(2026, 11, 1, tzinfo=UTC)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def contents(folder: ClusterFolder) -> dict[str, bytes]:
    return {str(each.relative_to(folder.path)): each.read_bytes() for each in folder.path.rglob("*") if each.is_file()}


def test_folder_and_keys_are_accessible_to_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "data" / "cluster"
    ClusterFolder(path).create("node", ["node"])
    assert mode(path) == 0o700
    assert {each.name: mode(each) for each in path.iterdir() if each.suffix == ".key"} == {
        "ca.key": 0o600,
        "server.key": 0o600,
        "client.key": 0o600,
    }
    assert sorted(each.name for each in path.iterdir() if each.suffix != ".key") == [
        "ca.pem",
        "client.pem",
        "ray",
        "ray.token",
        "server.pem",
    ]
    assert (mode(path / "ray"), mode(path / "ray" / "ca.key"), mode(path / "ray" / "node.key")) == (0o700, 0o600, 0o600)
    assert mode(path / "ray.token") == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["cluster"]  # nothing temporary is left


def test_folder_has_usable_certificates_of_both_roles(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "cluster")
    authority = folder.create("node", ["node", "127.0.0.1"])
    server_context(folder.files("server"))
    client_context(folder.files("client"))
    assert hosts_of(Path(folder.files("server").certificate).read_bytes()) == ["node", "127.0.0.1"]
    assert hosts_of(Path(folder.files("client").certificate).read_bytes()) == []
    loaded = CertificateAuthority.load((folder.path / "ca.pem").read_bytes(), (folder.path / "ca.key").read_bytes())
    assert loaded.fingerprint == authority.fingerprint


def test_folder_is_never_overwritten(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "cluster")
    folder.create("node", ["node"])
    before = contents(folder)
    with pytest.raises(ConfigError, match="not overwritten"):
        folder.create("node", ["node"])
    assert contents(folder) == before
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not overwritten"):
        ClusterFolder(tmp_path / "file").create("node", ["node"])


def test_folder_is_created_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    with pytest.raises(ConfigError, match="'a b'"):
        ClusterFolder(tmp_path / "cluster").create("node", ["a b"])
    assert [each.name for each in tmp_path.rglob("*")] == ["cluster"]
    ClusterFolder(tmp_path / "cluster").create("node", ["a"])  # an empty folder is used
    assert mode(tmp_path / "cluster") == 0o700


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        ClusterFolder(tmp_path / "file" / "cluster").create("node", ["a"])


def test_renewal_replaces_certificates_and_keeps_hosts_and_authority(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "cluster")
    before = folder.create("node", ["node", "10.0.0.1"], now=NOW)
    old = contents(folder)
    after = folder.renew("node", now=NOW + timedelta(days=200))
    new = contents(folder)
    assert after.fingerprint == before.fingerprint
    assert {name for name in old if old[name] != new[name]} == {
        f"{name}.{suffix}" for name in ("server", "client", "ray/node") for suffix in ("pem", "key")
    }
    assert hosts_of(new["server.pem"]) == ["node", "10.0.0.1"]
    assert expiry(new["server.pem"]) == NOW + timedelta(days=565)
    server_context(folder.files("server"))
    with pytest.raises(ConfigError, match="cluster init"):
        ClusterFolder(tmp_path / "missing").renew("node")


def test_context_is_loaded_while_the_files_are_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of certificate and key is new already: it is tried again when the other one is there."""
    folder = ClusterFolder(tmp_path / "cluster")
    folder.create("node", ["node"])
    key = folder.path / "server.key"
    old = key.read_bytes()
    folder.renew("node")
    new = key.read_bytes()
    pauses: list[float] = []

    def finish_renewal(seconds: float) -> None:
        pauses.append(seconds)
        replace_file(key, new)

    monkeypatch.setattr("syringa.cluster.tls.time.sleep", finish_renewal)
    replace_file(key, old)
    server_context(folder.files("server"))
    assert pauses == [tls.RENEWAL_SECONDS]


def test_files_are_put_in_place_after_all_are_written(tmp_path: Path) -> None:
    (tmp_path / "first").write_bytes(b"old")
    with pytest.raises(OSError, match="No such file"):
        replace_files([(tmp_path / "first", b"new", 0o600), (tmp_path / "missing" / "second", b"new", 0o600)])
    assert (tmp_path / "first").read_bytes() == b"old"


def test_ray_has_an_authority_of_its_own_and_a_certificate_of_both_sides(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "cluster")
    folder.create("node", ["node", "10.0.0.1"])
    folder.check_ray()
    files = folder.ray_files()
    server_context(files)
    client_context(files)
    assert hosts_of(Path(files.certificate).read_bytes()) == ["node", "10.0.0.1"]
    assert Path(files.ca).read_bytes() != (folder.path / "ca.pem").read_bytes()
    certificate, authority = (
        x509.load_pem_x509_certificate(Path(each).read_bytes()) for each in (files.certificate, folder.path / "ca.pem")
    )
    assert certificate.issuer != authority.subject


def test_renewal_adds_the_authority_of_ray_to_a_folder_without_it(tmp_path: Path) -> None:
    folder = ClusterFolder(tmp_path / "cluster")
    folder.create("node", ["node"])
    shutil.rmtree(folder.path / "ray")
    folder.ray_token.unlink()
    with pytest.raises(ConfigError, match=r"ca\.pem.*cluster init"):
        folder.check_ray()
    folder.renew("node")
    folder.check_ray()


@pytest.mark.parametrize("content", [None, b" \n"], ids=["missing", "empty"])
def test_a_folder_without_the_token_of_ray_is_refused(tmp_path: Path, content: bytes | None) -> None:
    folder = ClusterFolder(tmp_path / "cluster")
    folder.create("node", ["node"])
    folder.ray_token.unlink()
    if content is not None:
        folder.ray_token.write_bytes(content)
    with pytest.raises(ConfigError, match=r"ray\.token.*cluster init"):
        folder.check_ray()
