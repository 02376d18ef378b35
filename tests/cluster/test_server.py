"""The files that the cluster's server gives, and the clients to which it does."""

from __future__ import annotations

import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from syringa.cluster.authority import CertificateAuthority
from syringa.cluster.checksums import Checksums
from syringa.cluster.connection_limits import ConnectionTable
from syringa.cluster.folder import ClusterFolder
from syringa.cluster.join_tokens import parse_token
from syringa.cluster.manifest import HubSource, Manifest, ManifestPending, model_digest, model_paths
from syringa.cluster.served_models import ServedModels, publish
from syringa.cluster.server import ClusterServer
from syringa.cluster.tls import TlsFiles
from syringa.errors import ConfigError
from syringa.modelfiles import locate
from syringa.modelfiles.locate import DEFAULT_MODEL_FILE
from tests.cluster.certificates import PAST
from tests.cluster.serving import HANG_SECONDS, RunningCluster, running_cluster, served_path, write_model


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path) as running:
        yield running


@pytest.fixture
def node(cluster: RunningCluster, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client with the certificate of a node."""
    files = write_certificate(tmp_path, "node", ClusterFolder(cluster.folder).authority(), cluster, {"node"})
    with cluster.client(files) as client:
        yield client


def write_certificate(
    folder: Path, name: str, authority: CertificateAuthority, cluster: RunningCluster, roles: Any, **options: Any
) -> TlsFiles:
    pair = authority.issue(name, roles=roles, hosts=["127.0.0.1"], **options)
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    certificate.write_bytes(pair.certificate)
    key.touch(mode=0o600)
    key.write_bytes(pair.key)
    return TlsFiles(str(cluster.folder / "ca.pem"), str(certificate), str(key))


def get_manifest(client: httpx.Client, model: Path | str) -> Manifest:
    response = client.get(served_path(model, "manifest"))
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=Manifest)


def test_manifest_lists_the_files_that_a_worker_reads(
    cluster: RunningCluster, node: httpx.Client, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    manifest = get_manifest(node, model)
    assert [file.name for file in manifest.files] == [
        "config.json",
        "merges.txt",
        "model.safetensors",
        "tokenizer.json",
    ]
    weights = manifest.files[2]
    assert weights.sha256 == hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()
    assert (weights.size, weights.modified) == (300_000, (model / "model.safetensors").stat().st_mtime_ns)
    assert manifest.entry == ""
    assert manifest.hub is None


def test_default_model_is_served_from_its_package(cluster: RunningCluster, node: httpx.Client) -> None:
    cluster.serve("smollm2")
    manifest = get_manifest(node, "smollm2")
    assert [file.name for file in manifest.files] == [DEFAULT_MODEL_FILE] == [manifest.entry]


def test_files_and_ranges_are_served(cluster: RunningCluster, node: httpx.Client, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    get_manifest(node, model)
    content = (model / "model.safetensors").read_bytes()
    path = served_path(model, "files/model.safetensors")
    whole = node.get(path)
    assert (whole.status_code, whole.content) == (200, content)
    for requested, expected in [
        ("bytes=1000-", content[1000:]),
        ("bytes=5-9", content[5:10]),
        (f"bytes=299999-{10**17}", content[-1:]),
    ]:
        part = node.get(path, headers={"Range": requested})
        assert (part.status_code, part.content) == (206, expected)
        assert part.headers["Content-Range"].endswith("/300000")
    for requested in ("bytes=300000-", "bytes=9-5"):
        assert node.get(path, headers={"Range": requested}).status_code == 416
    for ignored in ("bytes=-5", "lines=1-2", "bytes=1-2,4-5", "bytes=" + "9" * 5000 + "-"):
        assert node.get(path, headers={"Range": ignored}).status_code == 200
    assert node.get(served_path(model, "files/merges.txt")).content == b""


def test_server_computes_each_checksum_once(
    cluster: RunningCluster, node: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    first = get_manifest(node, model)
    monkeypatch.setattr("syringa.cluster.checksums.hashlib", None)
    assert get_manifest(node, model) == first
    monkeypatch.undo()
    (model / "config.json").write_text("{}")
    assert get_manifest(node, model).digest != first.digest


def test_changed_file_is_not_sent(cluster: RunningCluster, node: httpx.Client, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    get_manifest(node, model)
    (model / "model.safetensors").write_bytes(b"other")
    response = node.get(served_path(model, "files/model.safetensors"))
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "file_changed"


def test_files_are_served_after_a_restart_without_another_manifest(cluster: RunningCluster, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    digest = model_digest(str(model))
    cluster.server.models.manifest(digest, HANG_SECONDS)
    restarted = ServedModels(cluster.models_file, Checksums(cluster.folder / "checksums.json"))
    with restarted.open(digest, "config.json").file as file:
        assert file.read() == (model / "config.json").read_bytes()


def test_manifest_is_pending_while_checksums_are_computed(tmp_path: Path) -> None:
    computing, go_on = threading.Event(), threading.Event()

    class SlowChecksums(Checksums):
        def compute(self, path: Path, on_bytes: Any = lambda count: None) -> str:
            computing.set()
            assert go_on.wait(HANG_SECONDS)
            return super().compute(path, on_bytes)

    model = write_model(tmp_path / "model")
    publish(tmp_path / "models", [str(model)])
    models = ServedModels(tmp_path / "models", SlowChecksums(tmp_path / "checksums"))
    digest = model_digest(str(model))
    total = sum(each.stat().st_size for each in model_paths(locate(str(model))).values())
    assert models.manifest(digest, wait=0.0) == ManifestPending(0, total)
    assert computing.wait(HANG_SECONDS)
    go_on.set()
    assert isinstance(models.manifest(digest, wait=HANG_SECONDS), Manifest)


def test_only_served_models_are_given(cluster: RunningCluster, node: httpx.Client, tmp_path: Path) -> None:
    model, other = write_model(tmp_path / "model"), write_model(tmp_path / "other", seed=2)
    cluster.serve(model)
    get_manifest(node, model)
    assert node.get(served_path(other, "manifest")).status_code == 404
    assert node.get(served_path(other, "files/config.json")).status_code == 404
    cluster.serve(other)
    get_manifest(node, other)
    assert node.get(served_path(model, "files/config.json")).status_code == 404


def test_missing_model_is_reported_in_words(cluster: RunningCluster, node: httpx.Client, tmp_path: Path) -> None:
    cluster.serve(tmp_path / "missing")
    response = node.get(served_path(tmp_path / "missing", "manifest"))
    assert response.status_code == 404
    assert "no such file or folder" in response.json()["error"]["message"]


OTHER_FILES = (
    "pytorch_model.bin", ".hidden", "../server/ca.key", "..%2Fserver%2Fca.key", "%2e%2e", "", "%2Fetc%2Fpasswd",
    "config.json%00", "%ff%fe",
)  # fmt: skip


def test_other_files_are_not_given(cluster: RunningCluster, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    files = ClusterFolder(cluster.join(tmp_path / "node")).files("node")
    for name in OTHER_FILES:
        with cluster.connect(files) as connection:  # clients would remove dots from paths
            connection.sendall(f"GET {served_path(model, 'files/')}{name} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert connection.recv(12) == b"HTTP/1.1 404", name


@pytest.mark.parametrize("kind", ["folder", "part of a folder"])
def test_link_out_of_the_folder_is_not_followed(
    cluster: RunningCluster, node: httpx.Client, tmp_path: Path, kind: str
) -> None:
    model = write_model(tmp_path / "model")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.json").write_text("secret")
    cluster.serve(model)
    if kind == "folder":
        (model / "link.json").symlink_to(tmp_path / "secret" / "key.json")
        response = node.get(served_path(model, "manifest"))
        assert response.status_code == 404
        assert "outside of the model's folder" in response.json()["error"]["message"]
    else:  # put there after the manifest was made
        get_manifest(node, model)
        (model / "config.json").unlink()
        (model / "config.json").symlink_to(tmp_path / "secret" / "key.json")
        assert node.get(served_path(model, "files/config.json")).status_code == 409


def test_links_within_the_cache_of_the_hub_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = write_model(repository / "snapshots" / "c0ffee")
    (repository / "blobs").mkdir()
    (snapshot / "config.json").rename(repository / "blobs" / "b10b")
    (snapshot / "config.json").symlink_to("../../blobs/b10b")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with running_cluster(tmp_path, hub=True) as cluster:
        cluster.serve("org/name")
        manifest = cluster.server.models.manifest(model_digest("org/name"), HANG_SECONDS)
    assert isinstance(manifest, Manifest)
    assert manifest.files[0].size == (repository / "blobs" / "b10b").stat().st_size
    assert manifest.hub == HubSource("org/name", "c0ffee")


@pytest.mark.parametrize(
    ("roles", "reason"), [(None, "needs the certificate of a node"), ({"client"}, "is not that of a node")]
)
def test_clients_that_are_not_nodes_get_no_files(
    cluster: RunningCluster, tmp_path: Path, roles: Any, reason: str
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    authority = ClusterFolder(cluster.folder).authority()
    files = None if roles is None else write_certificate(tmp_path, "peer", authority, cluster, roles)
    for path in (served_path(model, "manifest"), served_path(model, "files/config.json")):
        with cluster.client(files) as client:
            response = client.get(path)
            assert response.status_code == 403
            assert reason in response.json()["error"]["message"]
    with cluster.client(files) as client:
        assert client.post("/renew", content=b"").status_code == 403


@pytest.mark.parametrize("kind", ["server", "expired", "foreign", "ray"])
def test_certificates_that_are_not_valid_are_refused_in_the_handshake(
    cluster: RunningCluster, tmp_path: Path, kind: str
) -> None:
    authority = ClusterFolder(cluster.folder).authority()
    match kind:
        case "server":
            files = write_certificate(tmp_path, "peer", authority, cluster, {"server"})
        case "expired":
            files = write_certificate(tmp_path, "peer", authority, cluster, {"node"}, now=PAST, days=1)
        case "foreign":
            files = write_certificate(tmp_path, "peer", CertificateAuthority.create(), cluster, {"node"})
        case _:
            ray = ClusterFolder(cluster.folder / "ray").authority()
            files = write_certificate(tmp_path, "peer", ray, cluster, {"server", "client"})
    with cluster.client(files) as client, pytest.raises(httpx.TransportError):
        client.get("/ca")


def test_joined_node_gets_files_with_its_certificate(cluster: RunningCluster, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    folder = ClusterFolder(cluster.join(tmp_path / "node"))
    with cluster.client(folder.files("node")) as client:
        get_manifest(client, model)
    with pytest.raises(httpx.TransportError), cluster.client(folder.files("server")) as client:
        client.get(served_path(model, "manifest"))


# Clients that are slow, wrong or many


def test_wrong_tokens_are_limited_by_address(cluster: RunningCluster) -> None:
    body = {"secret": "00" * 24, "name": "node", "hosts": ["127.0.0.1"]}
    with cluster.client(None) as client:
        statuses = [client.post("/join", json=body).status_code for _ in range(11)]
        assert statuses == [401] * 10 + [429]
        right = body | {"secret": parse_token(cluster.token()).secret}
        refused = client.post("/join", json=right)
        assert refused.status_code == 429
        assert 0 < int(refused.headers["Retry-After"]) <= 60


@pytest.mark.parametrize(
    ("method", "path", "options", "status"),
    [
        ("POST", "/join", {"content": b"no JSON"}, 400),
        ("POST", "/join", {"content": b'{"secret": 1}'}, 400),
        ("POST", "/join", {"content": b"[" * 10_000}, 400),
        ("POST", "/join", {"content": b"x" * 20_000}, 400),
        ("POST", "/join", {"content": iter([b"{}"])}, 400),  # chunked
        ("POST", "/other", {"content": b""}, 404),
        ("GET", "/", {}, 404),
        ("GET", "/join", {}, 404),
        ("DELETE", "/ca", {}, 501),
    ],
)
def test_invalid_requests_are_answered_with_an_error(
    cluster: RunningCluster, method: str, path: str, options: Any, status: int
) -> None:
    with cluster.client(None) as client:
        response = client.request(method, path, **options)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_faults_of_the_folder_are_not_told_to_clients(cluster: RunningCluster) -> None:
    secret = parse_token(cluster.token()).secret
    (cluster.folder / "nodes.json").write_text("no JSON")
    with cluster.client(None) as client:
        response = client.post("/join", json={"secret": secret, "name": "a", "hosts": ["127.0.0.1"]})
    assert response.status_code == 500
    assert str(cluster.folder) not in response.text


def test_silent_clients_do_not_block_others_and_are_closed(tmp_path: Path) -> None:
    table = ConnectionTable(lambda: 0.0, max_anonymous=4)
    with running_cluster(tmp_path, connections=table) as cluster:
        port = cluster.server.address.port
        silent = [socket.create_connection(("127.0.0.1", port), HANG_SECONDS) for _ in range(4)]  # without TLS
        half = cluster.connect()  # the handshake is complete, the request is not
        half.sendall(b"GET /ca HTT")
        with cluster.client(None) as client:
            assert client.get("/ca").status_code == 200
        assert silent[0].recv(1) == b""  # the oldest have given way
        assert silent[1].recv(1) == b""
        for each in (*silent, half):
            each.close()


def test_clients_without_a_request_are_closed_after_a_time(tmp_path: Path) -> None:
    now = 0.0
    with running_cluster(tmp_path, connections=ConnectionTable(lambda: now)) as cluster:
        connection = cluster.connect()
        now = 21.0
        assert connection.recv(1) == b""
        connection.close()


def test_connection_that_is_ended_while_tls_takes_it_over_is_closed(tmp_path: Path) -> None:
    class EndingTable(ConnectionTable):
        def replace(self, connection: socket.socket, wrapped: socket.socket) -> bool:
            self.end_all()  # another thread does, while the connection has no descriptor
            return super().replace(connection, wrapped)

    with (
        running_cluster(tmp_path, connections=EndingTable(lambda: 0.0)) as cluster,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        cluster.connect()


def test_node_with_too_many_connections_is_asked_to_try_again(tmp_path: Path) -> None:
    table = ConnectionTable(lambda: 0.0, max_per_node=1)
    with running_cluster(tmp_path, connections=table) as cluster:
        files = ClusterFolder(cluster.join(tmp_path / "node")).files("node")
        model = write_model(tmp_path / "model")
        cluster.serve(model)
        with cluster.client(files) as first, cluster.client(files) as second:
            assert first.get(served_path(model, "manifest")).is_success
            response = second.get(served_path(model, "manifest"))
            assert (response.status_code, response.headers["Retry-After"]) == (503, "2")
            assert response.json()["error"]["code"] == "too_many_connections"


def test_node_that_reads_slowly_does_not_block_others(
    cluster: RunningCluster, node: httpx.Client, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model", size=8 << 20)
    cluster.serve(model)
    get_manifest(node, model)
    with node.stream("GET", served_path(model, "files/model.safetensors")) as slow:  # nothing of it is read yet
        files = ClusterFolder(cluster.join(tmp_path / "other", "other")).files("node")
        with cluster.client(files) as other:
            assert other.get(served_path(model, "files/config.json")).status_code == 200
        content = hashlib.sha256()
        for chunk in slow.iter_raw():
            content.update(chunk)
    assert content.hexdigest() == hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()


def test_address_that_is_taken_is_one_line(cluster: RunningCluster, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 127.0.0.1:.*Address already in use"):
        ClusterServer(cluster.server.address, cluster.folder, cluster.server.models)


def test_renewed_certificate_is_used_without_a_restart(cluster: RunningCluster) -> None:
    def serial() -> str:
        with cluster.connect() as connection:
            certificate = connection.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"])

    before = serial()
    ClusterFolder(cluster.folder).renew("head")
    assert serial() != before
