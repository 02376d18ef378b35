"""A cluster's server in this process, models for it, and nodes that have joined."""

from __future__ import annotations

import contextlib
import functools
import random
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from syringa.cluster.checksums import Checksums
from syringa.cluster.folder import ClusterFolder, replace_file
from syringa.cluster.join import ServerAddress, join
from syringa.cluster.join_tokens import JoinTokens
from syringa.cluster.manifest import model_digest
from syringa.cluster.served_models import ServedModels, publish
from syringa.cluster.server import ClusterServer
from syringa.cluster.tls import TlsFiles, client_context

HANG_SECONDS = 120.0


class RunningCluster:
    """A server, its folder and the models that it serves."""

    def __init__(self, folder: Path, server: ClusterServer, models_file: Path) -> None:
        self.folder, self.server, self.models_file = folder, server, models_file

    @property
    def address(self) -> str:
        return str(self.server.address)

    def token(self, **options: Any) -> str:
        return JoinTokens(self.folder).create(**options)

    def join(self, folder: Path, name: str = "node") -> Path:
        """Join as a node, and return its folder."""
        join(self.address, self.token(), folder, name=name)
        return folder

    def serve(self, *models: Path | str) -> None:
        publish(self.models_file, map(str, models))

    def client(self, files: TlsFiles | None) -> httpx.Client:
        """Return a client with a certificate; with None, one without."""
        context = self._context(files)
        return httpx.Client(base_url=f"https://{self.address}", verify=context, timeout=HANG_SECONDS, trust_env=False)

    def connect(self, files: TlsFiles | None = None) -> ssl.SSLSocket:
        """Return a connection without a request."""
        raw = socket.create_connection(("127.0.0.1", self.server.address.port), HANG_SECONDS)
        return self._context(files).wrap_socket(raw, server_hostname="127.0.0.1")

    def _context(self, files: TlsFiles | None) -> ssl.SSLContext:
        if files is not None:
            return client_context(files)
        return ssl.create_default_context(cafile=str(self.folder / "ca.pem"))


@functools.cache
def _cluster_files() -> dict[str, bytes]:
    """Return the files of a new cluster; they are made once."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster"
        ClusterFolder(path).create("head", ["127.0.0.1", "localhost", "10.9.9.9"])
        return {str(each.relative_to(path)): each.read_bytes() for each in path.rglob("*") if each.is_file()}


@contextlib.contextmanager
def running_cluster(
    folder: Path, *, hub: bool = False, fresh: bool = False, **options: Any
) -> Iterator[RunningCluster]:
    """Run a server in a thread. `fresh`: with an authority of its own, unlike that of others."""
    if fresh:
        _cluster_files.cache_clear()
    cluster, models_file = folder / "server", folder / "models.json"
    for name, content in _cluster_files().items():
        (cluster / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(cluster / name, content)
    publish(models_file, [])
    models = ServedModels(models_file, Checksums(cluster / "checksums.json"), hub=hub)
    server = ClusterServer(ServerAddress("127.0.0.1", 0), cluster, models, **options)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield RunningCluster(cluster, server, models_file)
    finally:
        server.shutdown()
        server.server_close()
        thread.join(HANG_SECONDS)


def write_model(folder: Path, seed: int = 1, size: int = 300_000) -> Path:
    """Write a folder that passes for a model: nothing reads its tensors here."""
    folder.mkdir(parents=True)
    generator = random.Random(seed)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(generator.randbytes(size))
    (folder / "merges.txt").write_bytes(b"")
    (folder / "pytorch_model.bin").write_bytes(b"another format")
    (folder / ".hidden").write_bytes(b"secret")
    return folder


def served_path(model: Path | str, rest: str) -> str:
    return f"/models/{model_digest(str(model))}/{rest}"
