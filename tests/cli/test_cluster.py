from __future__ import annotations

import re
from pathlib import Path

import pytest

from syringa.cli import main
from syringa.cluster.authority import CertificateAuthority, hosts_of
from syringa.cluster.join import join
from tests.cluster.serving import running_cluster


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["cluster", *arguments])
    return int(ended.value.code or 0)


def test_cluster_init_creates_certificates_and_prints_the_fingerprint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certificates"
    assert run("init", "--dir", str(folder), "--host", "10.1.2.3") == 0
    printed = capsys.readouterr().out
    authority = CertificateAuthority.load((folder / "ca.pem").read_bytes(), (folder / "ca.key").read_bytes())
    assert authority.fingerprint in printed
    assert str(folder) in printed
    assert re.search(r"certificates expire on \d{4}-\d\d-\d\d", printed)
    assert {"localhost", "127.0.0.1", "10.1.2.3"} <= set(hosts_of((folder / "server.pem").read_bytes()))
    assert "PRIVATE" not in printed


def test_cluster_init_uses_the_data_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert run("init") == 0
    assert (tmp_path / "syringa" / "cluster" / "ca.pem").exists()


def test_cluster_init_refuses_to_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("init", "--dir", str(tmp_path / "a")) == 0
    assert run("init", "--dir", str(tmp_path / "a")) == 1
    assert capsys.readouterr().err == f"syringa: {tmp_path}/a: there is something already, which is not overwritten\n"


def test_cluster_renew_issues_new_certificates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("renew", "--dir", str(tmp_path / "a")) == 1
    assert "`syringa cluster init` makes the certificates" in capsys.readouterr().err
    run("init", "--dir", str(tmp_path / "a"))
    before = (tmp_path / "a" / "client.pem").read_bytes()
    assert run("renew", "--dir", str(tmp_path / "a")) == 0
    assert (tmp_path / "a" / "client.pem").read_bytes() != before


def test_cluster_token_prints_a_token_and_lists_its_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running_cluster(tmp_path) as server:
        assert run("token", "--dir", str(server.folder), "--hours", "2") == 0
        token = capsys.readouterr().out.strip()
        assert run("token", "--dir", str(server.folder), "--node", "gpu-2") == 0
        capsys.readouterr()
        join(server.address, token, tmp_path / "node", name="gpu-1")
        assert run("token", "--dir", str(server.folder), "--list") == 0
    listed = capsys.readouterr().out
    first, second = listed.splitlines()
    assert re.fullmatch(r"[0-9a-f]{8}  used    until \d{4}-\d\d-\d\d \d\d:\d\d UTC  by gpu-1", first)
    assert re.fullmatch(r"[0-9a-f]{8}  valid   until .* UTC  for gpu-2", second)
    assert token not in listed


def test_cluster_renew_of_a_node_gets_certificates_from_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_cluster(tmp_path) as server:
        folder = server.join(tmp_path / "node", "gpu-1")
        before = (folder / "node.pem").read_bytes()
        assert run("renew", "--dir", str(folder)) == 0
    assert (folder / "node.pem").read_bytes() != before
    assert "the certificates of the node gpu-1, until" in capsys.readouterr().out


def test_serve_refuses_to_start_without_the_certificates_of_its_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cluster"
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--worker-host", "127.0.0.1", "--cluster-dir", str(folder)])
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"syringa: {folder}/ca.pem: ")
    assert "`syringa cluster init` makes the files for TLS" in error
