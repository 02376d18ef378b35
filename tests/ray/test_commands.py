"""`syringa cluster start` and `join` as processes: what they start and survive, and that nothing stays behind."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.cluster.folder import ClusterFolder
from syringa.cluster.own_address import own_address
from syringa.ray.processes import CLUSTER_DIR_VARIABLE
from syringa.ray.redis import PASSWORD_VARIABLE
from tests.engine.worker.tiny_llama import save_tiny_llama
from tests.ray.harness import KNOWN_SECONDS, cluster_folder, free_port, processes_with, until

pytestmark = pytest.mark.slow

SERVER, GCS = b"syringa.cli.serve_process", b"gcs_server"


class Command:
    """A running `syringa cluster` command."""

    def __init__(self, log: Path, *arguments: str, folder: Path | None = None, **variables: str) -> None:
        """`folder`: in which it is run, if not the current one. `variables`: of its environment."""
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "syringa", "cluster", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=os.environ | variables,
            )

    def until_logged(self, pattern: str, count: int = 1) -> re.Match[str]:
        """Wait until a pattern was logged so many times, and return the last one."""

        def found() -> re.Match[str] | None:
            matches = list(re.finditer(pattern, self.log.read_text()))
            if len(matches) < count:
                assert self.process.poll() is None, self.log.read_text()
                return None
            return matches[-1]

        match = until(found)
        assert isinstance(match, re.Match)
        return match

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class StartedCluster(Command):
    def __init__(self, folder: Path, *arguments: str, max_length: int = 512, **variables: str) -> None:
        self.folder = ClusterFolder(folder / "cluster")
        self.address = f"{own_address()}:{free_port()}"
        model = folder / "model"
        model.mkdir()
        save_tiny_llama(model, max_length)
        super().__init__(
            folder / "start.log",
            *("start", "--port", "0", "--model", str(model), "--served-model-name", "m", "--cpus", "1"),
            *("--threads", "1", "--kv-cache-tokens", "1024", "--database", str(folder / "syringa.db")),
            *("--cluster-dir", str(self.folder.path), "--cluster-address", self.address),
            *("--ray-port", str(free_port()), *arguments),
            folder=None,
            **variables,
        )

    def url(self, starts: int = 1) -> str:
        return f"http://127.0.0.1:{self.until_logged(r'listening host=[^ ]+ port=([0-9]+)', starts)[1]}"

    def replicas(self, starts: int = 1) -> list[dict[str, Any]]:
        data = httpx.get(self.url(starts) + "/admin/replicas", timeout=60).raise_for_status().json()["data"]
        return [each for each in data if each["status"] == "ready"]

    def nodes(self) -> list[dict[str, Any]]:
        data = httpx.get(self.url() + "/admin/nodes", timeout=60).raise_for_status().json()["data"]
        assert isinstance(data, list)
        return data

    def complete(self, starts: int = 1) -> str:
        body = {"prompt": "the", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(self.url(starts) + "/v1/completions", json=body, timeout=300)
        return str(answer.raise_for_status().json()["choices"][0]["text"])

    def find(self, module: bytes) -> list[int]:
        """Return the ids of the processes of this cluster that run a module or program."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if module in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def processes(self) -> list[int]:
        return processes_with(CLUSTER_DIR_VARIABLE, str(self.folder.path))

    def token(self) -> str:
        command = [sys.executable, "-m", "syringa", "cluster", "token", "--dir", str(self.folder.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def started(folder: Path, *arguments: str, max_length: int = 512, **variables: str) -> Iterator[StartedCluster]:
    cluster = StartedCluster(folder, *arguments, max_length=max_length, **variables)
    try:
        until(cluster.replicas)
        yield cluster
    finally:
        cluster.end()
        until(lambda: not cluster.processes())


def test_a_cluster_starts_is_joined_and_left_and_adopts_its_replicas(tmp_path: Path) -> None:
    with started(tmp_path) as cluster:
        text = cluster.complete()
        node = Command(
            tmp_path / "node.log",
            *("join", cluster.address, "--token", cluster.token(), "--dir", str(tmp_path / "node")),
            *("--name", "n1", "--pool", "x", "--label", "zone=a", "--cpus", "1", "--grace", "5"),
        )
        try:
            node.until_logged("Joined .* as n1 .*zone=a, pool=x")
            status = subprocess.run(
                [sys.executable, "-m", "syringa", "cluster", "status", "--dir", str(cluster.folder.path)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout  # it finds the head, whose port is another than that of the settings
            assert re.search(r"^n1 .* pool=x,zone=a *$", status, re.MULTILINE)
            nodes = until(lambda: {each["name"]: each for each in cluster.nodes() if each["name"] == "n1"})
            assert nodes["n1"]["labels"] == {"zone": "a", "pool": "x"}
            node.process.terminate()
            assert node.process.wait(120) == 0
            assert "Left the cluster." in node.log.read_text()
            until(lambda: all(each["name"] != "n1" for each in cluster.nodes()))
        finally:
            node.end()
        until(lambda: not processes_with(CLUSTER_DIR_VARIABLE, str(tmp_path / "node")))

        (before,) = cluster.replicas()
        (server,) = cluster.find(SERVER)
        os.kill(server, signal.SIGKILL)
        cluster.url(2)
        assert cluster.complete(2) == text
        assert [each["id"] for each in until(lambda: cluster.replicas(2))] == [before["id"]]  # the same process

        cluster.process.terminate()
        assert cluster.process.wait(120) == 0


def stream(client: httpx.Client, number: int) -> str:
    """Return the text of a long answer. Each number has a length of its own, so that answers end at different times."""
    body = {"prompt": f"the {number}", "max_tokens": 2000 + 300 * number, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json=body | {"stream": True}).raise_for_status()
    lines = answer.content.split(b"\n")
    events = [json.loads(each.removeprefix(b"data: ")) for each in lines if each.startswith(b"data: {")]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_streams_survive_a_node_that_gets_sigterm(tmp_path: Path) -> None:
    numbers = range(6)
    options = ("--replicas", "2", "--kv-cache-tokens", "32768")
    with (
        started(tmp_path, *options, max_length=4096) as cluster,
        httpx.Client(base_url=cluster.url(), timeout=300) as client,
        ThreadPoolExecutor(len(numbers)) as executor,
    ):
        expected = list(executor.map(functools.partial(stream, client), numbers))
        node = Command(
            tmp_path / "node.log",
            *("join", cluster.address, "--token", cluster.token(), "--dir", str(tmp_path / "node")),
            *("--name", "n1", "--cpus", "1", "--grace", "0"),
        )
        over = threading.Event()

        def repeat(number: int) -> None:
            while not over.is_set():
                assert stream(client, number) == expected[number]

        try:
            node.until_logged("Joined")
            until(lambda: {each["node"] for each in cluster.replicas()} > {"n1"})
            running = [executor.submit(repeat, number) for number in numbers]
            try:
                time.sleep(KNOWN_SECONDS)
                node.process.terminate()
                assert node.process.wait(120) == 0
            finally:
                over.set()
            for each in running:
                each.result()
        finally:
            node.end()
        assert "Left the cluster." in node.log.read_text()
        cluster.until_logged(r"node=n1 sequences=\d+ grace=0 reason='node n1 is drained'")
        assert 'reason="drain"' in client.get("/metrics").text


def test_a_killed_start_leaves_nothing_behind(tmp_path: Path) -> None:
    with started(tmp_path) as cluster:
        assert cluster.find(GCS)
        cluster.process.kill()
        cluster.process.wait()
        until(lambda: not cluster.processes())


def test_serving_goes_on_without_a_head_which_is_started_again_after_the_time_that_nodes_wait(tmp_path: Path) -> None:
    with started(tmp_path, RAY_gcs_rpc_server_reconnect_timeout_s="20") as cluster:
        text = cluster.complete()
        (gcs,) = cluster.find(GCS)
        os.kill(gcs, signal.SIGTERM)  # as `ray stop`: Ray itself takes that for wanted
        cluster.until_logged("Ray's head has died")
        assert cluster.complete() == text
        cluster.until_logged("replica is started: ", 4)  # two lines each: that of the server, and that of the bridge
        assert cluster.complete() == text


@contextlib.contextmanager
def redis(folder: Path, password: str) -> Iterator[str]:
    """Run a Redis with a password, and yield its address."""
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("needs redis-server")
    port = free_port()
    command = [program, "--port", str(port), "--save", "", "--dir", str(folder), "--requirepass", password]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def accepts() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 60):
            return True
        return False

    try:
        until(accepts)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def test_a_head_with_redis_is_started_again_at_once_and_finds_its_replicas(tmp_path: Path) -> None:
    with (
        redis(tmp_path, "a password") as address,
        started(tmp_path, "--redis", address, RAY_REDIS_PASSWORD="a password") as cluster,
    ):
        text = cluster.complete()
        (before,) = cluster.replicas()
        (gcs,) = cluster.find(GCS)
        assert processes_with(PASSWORD_VARIABLE, "a password") == [cluster.process.pid]  # no child has it
        os.kill(gcs, signal.SIGKILL)
        cluster.until_logged("replica is found: ")  # by the next bridge
        assert cluster.complete() == text
        assert [each["id"] for each in until(cluster.replicas)] == [before["id"]]
        until(lambda: [each["state"] for each in cluster.nodes()] == ["ready"])


def test_join_refuses_a_head_that_does_not_accept_it(tmp_path: Path) -> None:
    with started(tmp_path) as cluster:
        folder = tmp_path / "node"

        def join(*arguments: str) -> str:
            command = [sys.executable, "-m", "syringa", "cluster", "join", "--dir", str(folder), *arguments]
            result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            assert result.returncode == 1
            assert result.stderr.count("\n") == 1
            return result.stderr

        assert "the join token is not one of this cluster" in join(
            cluster.address, "--token", _with_another_secret(cluster.token()), "--name", "n1"
        )
        node = Command(
            tmp_path / "node.log",
            *("join", cluster.address, "--token", cluster.token(), "--dir", str(folder), "--name", "n1", "--cpus", "1"),
        )
        node.until_logged("Joined")
        node.process.send_signal(signal.SIGINT)
        node.process.send_signal(signal.SIGINT)
        assert node.process.wait(120) == 0

        token = (folder / "ray.token").read_bytes()
        (folder / "ray.token").write_text("0" * 64)
        assert "refuses the token of this cluster (ray.token)" in join()
        (folder / "ray.token").write_bytes(token)
        foreign = cluster_folder(tmp_path / "foreign")
        for name in ("node.pem", "node.key", "ca.pem"):
            (folder / "ray" / name).write_bytes((foreign.path / "ray" / name).read_bytes())
        assert "cannot be trusted: its certificate is not from the authority of this cluster" in join()


def _with_another_secret(token: str) -> str:
    return token[:-4] + ("AAAA" if token[-4:] != "AAAA" else "BBBB")
