"""Nodes fetch models from the cluster's server, over connections that break."""

from __future__ import annotations

import contextlib
import random
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.cluster.fetch_files import NodeFiles
from syringa.cluster.join import MEMBERSHIP, Membership
from syringa.cluster.manifest import Manifest, ManifestFile, model_digest
from syringa.cluster.model_cache import ModelCache
from syringa.cluster.served_models import ServedFile
from syringa.engine.processes.model_fetcher import ModelFetcher
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ModelError
from tests.cluster.serving import HANG_SECONDS, RunningCluster, running_cluster, write_model
from tests.modelfiles.fake_hub import COMMIT, FakeHub, fake_hub
from tests.modelfiles.gguf_builder import TENSORS, gguf, llama
from tests.tiers import slow

NAMES = ["config.json", "merges.txt", "model.safetensors", "tokenizer.json"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path) as running:
        yield running


class FetchingNode:
    """A node whose files are not those of the server's machine, although it is the same."""

    def __init__(self, cluster: RunningCluster, folder: Path, capacity: int = 0) -> None:
        self.cluster, self.folder = cluster, cluster.join(folder / "node")
        self.cache = ModelCache(folder / "cache", capacity, sleep=lambda seconds: None)
        self.files = NodeFiles(self.folder, self.cache, sleep=lambda seconds: None)
        self.progress: list[tuple[int, int]] = []

    def use_server(self, address: str) -> None:
        membership = Membership("node", address)
        (self.folder / MEMBERSHIP).write_bytes(msgspec.json.encode(membership))

    def fetch(self, model: Path | str) -> Path:
        path, _ = self.files.fetch(str(model), lambda done, total: self.progress.append((done, total)))
        return Path(path)


@pytest.fixture
def node(cluster: RunningCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FetchingNode:
    monkeypatch.setattr(NodeFiles, "_in_place", lambda *_: None)
    return FetchingNode(cluster, tmp_path)


def content(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


def test_node_fetches_the_modules_of_an_embedding_model(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path
) -> None:
    model = write_model(tmp_path / "model")
    for name in ("1_Pooling", "notes"):
        (model / name).mkdir()
        (model / name / "config.json").write_text("{}")
    cluster.serve(model)
    path = node.fetch(model)
    files = sorted(each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file())
    assert files == ["1_Pooling/config.json", *NAMES]


def test_node_fetches_the_files_of_a_model_once(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    path = node.fetch(model)
    assert content(path) == {name: (model / name).read_bytes() for name in NAMES}
    total = sum((model / name).stat().st_size for name in NAMES)
    assert node.progress[-1] == (total, total)
    assert node.progress == sorted(node.progress)
    monkeypatch.setattr(cluster.server.models, "open", None)
    assert node.fetch(model) == path


def test_gguf_and_its_parts_are_fetched(cluster: RunningCluster, node: FetchingNode, tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    parts = [tmp_path / "gguf" / f"model-{number:05}-of-00002.gguf" for number in (1, 2)]
    for number, (part, tensor) in enumerate(zip(parts, TENSORS, strict=True)):
        metadata = {**(llama() if number == 0 else {}), "split.no": number, "split.count": 2}
        part.write_bytes(gguf(metadata, {tensor: TENSORS[tensor]}))
    (tmp_path / "gguf" / "other.gguf").write_bytes(b"another model")
    cluster.serve(parts[0])
    path = node.fetch(parts[0])
    assert path.name == parts[0].name
    assert content(path.parent) == {part.name: part.read_bytes() for part in parts}


@contextlib.contextmanager
def cutting_proxy(port: int, cuts: Iterator[int]) -> Iterator[str]:
    """Forward connections to a port. Each is cut after so many bytes to the client."""
    listener = socket.create_server(("127.0.0.1", 0))

    def forward(source: socket.socket, target: socket.socket, left: float) -> None:
        with contextlib.suppress(OSError):
            while left > 0 and (data := source.recv(min(65536, int(min(left, 65536))))):
                target.sendall(data)
                left -= len(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port), HANG_SECONDS)
                opened.extend([client, server])
                limit = next(cuts, 0) or float("inf")
                threading.Thread(target=forward, args=(client, server, float("inf")), daemon=True).start()
                threading.Thread(target=forward, args=(server, client, limit), daemon=True).start()

    opened: list[socket.socket] = []
    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(HANG_SECONDS)
        for each in opened:
            each.close()


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_download_continues_after_cut_connections(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", size=400_000)
    cluster.serve(model)
    monkeypatch.setattr("syringa.modelfiles.download._CHUNK", 4096)
    generator = random.Random(seed)
    cuts = [generator.choice([500, 20_000, 100_000]) + generator.randrange(20_000) for _ in range(10)]
    remaining = iter(cuts)
    with cutting_proxy(cluster.server.address.port, remaining) as address:
        node.use_server(address)
        path = None
        for _ in range(len(cuts)):  # many cuts without a byte end an attempt; the next one continues
            with contextlib.suppress(ModelError):
                path = node.fetch(model)
                break
    assert next(remaining, None) is None  # all were made
    assert path is not None
    assert content(path) == {name: (model / name).read_bytes() for name in NAMES}


def test_download_is_continued_by_a_later_process(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model", size=500_000)
    cluster.serve(model)
    monkeypatch.setattr("syringa.modelfiles.download._CHUNK", 4096)

    class Cancelled(Exception):
        pass

    def cancel(done: int, total: int) -> None:
        if done > 250_000:
            raise Cancelled

    with pytest.raises(Cancelled):
        node.files.fetch(str(model), cancel)
    kept = next(node.cache.folder.rglob("model.safetensors.part")).stat().st_size
    assert kept > 240_000
    sent = 0
    opened = cluster.server.models.open

    class CountingFile:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> CountingFile:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def seek(self, position: int) -> None:
            self.file.seek(position)

        def read(self, size: int) -> bytes:
            nonlocal sent
            data: bytes = self.file.read(size)
            sent += len(data)
            return data

    def open_counting(digest: str, name: str) -> ServedFile:
        served = opened(digest, name)
        return msgspec.structs.replace(served, file=CountingFile(served.file))

    monkeypatch.setattr(cluster.server.models, "open", open_counting)
    later = NodeFiles(node.folder, ModelCache(node.cache.folder), sleep=lambda seconds: None)
    path, _ = later.fetch(str(model), lambda done, total: None)
    assert content(Path(path))["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert sent == 500_000 - kept + 2  # of the weights, and tokenizer.json


def corrupting(cluster: RunningCluster, times: int) -> Callable[[str, str], ServedFile]:
    """Return a way to open files that gives other weights so many times."""
    opened, left = cluster.server.models.open, times

    def open_file(digest: str, name: str) -> ServedFile:
        nonlocal left
        served = opened(digest, name)
        if name == "model.safetensors" and left:
            left -= 1
            served.file.close()
            path = cluster.folder / f"corrupt{left}"
            path.write_bytes(bytes(served.size))
            return msgspec.structs.replace(served, file=path.open("rb"))
        return served

    return open_file


def test_file_with_a_wrong_checksum_is_fetched_once_more(
    cluster: RunningCluster,
    node: FetchingNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    monkeypatch.setattr(cluster.server.models, "open", corrupting(cluster, 1))
    assert content(node.fetch(model))["model.safetensors"] == (model / "model.safetensors").read_bytes()
    assert "wrong checksum and was deleted: file=model.safetensors" in caplog.text


def test_file_with_a_wrong_checksum_twice_is_deleted_and_reported(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    monkeypatch.setattr(cluster.server.models, "open", corrupting(cluster, 2))
    with pytest.raises(ModelError, match="wrong checksum twice, and was deleted"):
        node.fetch(model)
    assert not list(node.cache.folder.rglob("model.safetensors*"))
    assert list(node.cache.folder.rglob("config.json"))
    node.fetch(model)


def test_parallel_replicas_of_a_node_share_one_download(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    opened, requested = cluster.server.models.open, []

    def note_open(digest: str, name: str) -> ServedFile:
        requested.append(name)
        return opened(digest, name)

    monkeypatch.setattr(cluster.server.models, "open", note_open)
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(node.fetch(model))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    assert len(paths) == 3
    assert len(set(paths)) == 1
    assert sorted(requested) == NAMES


def test_files_that_change_on_the_server_are_fetched_anew(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    opened, changes = cluster.server.models.open, [b"new weights"]

    def change(digest: str, name: str) -> ServedFile:
        if name == "model.safetensors" and changes:
            (model / name).write_bytes(changes.pop())
        return opened(digest, name)

    monkeypatch.setattr(cluster.server.models, "open", change)
    assert content(node.fetch(model))["model.safetensors"] == b"new weights"
    changes[:] = [bytes(index) for index in range(100, 110)]
    shutil.rmtree(node.cache.folder)
    with pytest.raises(ModelError, match="keep changing"):
        node.fetch(model)


def test_capacity_of_the_pool_bounds_the_cache(cluster: RunningCluster, tmp_path: Path, node: FetchingNode) -> None:
    first, second = write_model(tmp_path / "first", 1), write_model(tmp_path / "second", 2)
    cluster.serve(first, second)
    files = NodeFiles(node.folder, ModelCache(node.cache.folder, 500_000), sleep=lambda seconds: None)
    path, used = files.fetch(str(first), lambda done, total: None)
    assert used is not None
    with pytest.raises(ModelError, match="in use"):
        files.fetch(str(second), lambda done, total: None)
    used.release()
    files.fetch(str(second), lambda done, total: None)
    assert not Path(path).exists()


def test_model_that_is_not_served_is_one_line(cluster: RunningCluster, node: FetchingNode, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="this server does not serve such a model"):
        node.fetch(tmp_path / "model")


def test_unreachable_server_and_wrong_certificate_are_one_line(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        node.use_server(f"127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(ModelError, match=r"the connection failed \(Connection refused\)"):
            node.fetch("model")
    with running_cluster(tmp_path / "other", fresh=True) as other:
        node.use_server(other.address)
        with pytest.raises(ModelError, match="not from the authority of this cluster"):
            node.fetch("model")


def test_server_does_not_choose_paths_on_the_node(cluster: RunningCluster) -> None:
    for name in ("../escaped", "/etc/passwd", "a/b", "1_A/..", "1_A/2_B/c", "..", "", "a\0b"):
        listed = msgspec.json.encode({"type": "manifest", "entry": "", "files": [
            {"name": name, "size": 1, "sha256": "0" * 64, "modified": 0},
        ]})  # fmt: skip
        with pytest.raises(msgspec.ValidationError, match="not the name of a file"):
            msgspec.json.decode(listed, type=Manifest)
    with pytest.raises(ValueError, match="lacks files"):
        Manifest("missing.gguf", (ManifestFile("a", 1, "0" * 64, 0),))


# Files that are on the node already


@pytest.fixture
def same_machine(cluster: RunningCluster, tmp_path: Path) -> FetchingNode:
    """A node with the file system of the server."""
    return FetchingNode(cluster, tmp_path)


def test_shared_files_are_used_in_place(
    cluster: RunningCluster, same_machine: FetchingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    cluster.server.models.manifest(model_digest(str(model)), HANG_SECONDS)
    monkeypatch.setattr("syringa.cluster.checksums.hashlib", None)  # the same times of change are enough
    assert same_machine.fetch(model) == model
    assert not list(same_machine.cache.entries())


def test_copy_with_the_same_content_is_used_in_place(
    cluster: RunningCluster, same_machine: FetchingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    cluster.serve(model)
    manifest = cluster.server.models.manifest(model_digest(str(model)), HANG_SECONDS)
    shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    shutil.rmtree(model)
    (tmp_path / "copy").rename(model)
    assert isinstance(manifest, Manifest)
    monkeypatch.setattr(cluster.server.models, "manifest", lambda digest, wait: manifest)
    assert same_machine.fetch(model) == model
    (model / "model.safetensors").write_bytes(bytes(300_000))
    assert same_machine.files._in_place(str(model), manifest, lambda done, total: None) is None


def test_model_of_the_servers_own_machine_is_not_fetched(cluster: RunningCluster, tmp_path: Path) -> None:
    """The folder of the server has no membership; its replicas use the path as it is."""
    files = NodeFiles(cluster.folder, ModelCache(tmp_path / "cache"))
    assert files.fetch("smollm2", lambda done, total: None) == ("smollm2", None)


def test_fetcher_of_a_replica_changes_the_path_and_holds_the_files(
    cluster: RunningCluster, node: FetchingNode, tmp_path: Path
) -> None:
    first, second = write_model(tmp_path / "first", 1), write_model(tmp_path / "second", 2)
    cluster.serve(first, second)
    cache = ModelCache(node.cache.folder, 500_000)
    fetcher, other = (ModelFetcher(node.folder, cache=cache) for _ in range(2))
    said: list[str] = []
    options = fetcher.fetch(WorkerOptions(socket="s", model=str(first), threads=3), said.append)
    assert (options.threads, Path(options.model).parent) == (3, cache.folder)
    assert said[-1] == "0.00 of 0.00 GB"
    with pytest.raises(ModelError, match="in use"):
        other.fetch(WorkerOptions(socket="s", model=str(second)), said.append)
    fetcher.close()
    other.fetch(WorkerOptions(socket="s", model=str(second)), said.append)


# The Hugging Face Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield running


@pytest.mark.parametrize("fault", ["", "corrupt", "gone"])
def test_files_come_from_the_hub_where_allowed_and_from_the_server_otherwise(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(NodeFiles, "_in_place", lambda *_: None)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = write_model(tmp_path / "hub" / "models--org--name" / "snapshots" / COMMIT)
    hub.repositories["org/name"] = {name: (snapshot / name).read_bytes() for name in NAMES}
    if fault == "corrupt":
        hub.corrupt.add("config.json")
    elif fault == "gone":
        hub.repositories.clear()
    with running_cluster(tmp_path, hub=True) as cluster:
        cluster.serve("org/name")
        node = FetchingNode(cluster, tmp_path)
        opened, from_server = cluster.server.models.open, []

        def note_open(digest: str, name: str) -> ServedFile:
            from_server.append(name)
            return opened(digest, name)

        monkeypatch.setattr(cluster.server.models, "open", note_open)
        path = node.fetch("org/name")
    assert content(path) == {name: (snapshot / name).read_bytes() for name in NAMES}
    assert from_server == ([] if not fault else NAMES)
