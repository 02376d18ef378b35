"""A model on the real vLLM whose replica is placed by Ray on a node that joins, which fetches the model's files.

    SLOW=1 VLLM_PYTHON=.venvs/vllm/bin/python pytest -n0 tests/ray/test_vllm_on_ray.py

See tests/e2e/test_vllm.py for the environment and the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.cluster.own_address import own_address
from syringa.engine.vllm.launch import MODULE
from syringa.ray.processes import CLUSTER_DIR_VARIABLE
from tests.e2e.test_vllm import LOAD_SECONDS, PYTHON, folder  # noqa: F401  a fixture
from tests.e2e.test_vllm_replicas import answer
from tests.ray.harness import free_port, processes_with
from tests.ray.test_commands import Command

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")]

# The path is a relative one, which nodes do not have: they fetch the files.
SETTINGS = """
load_timeout = 0
[[models]]
id = "on-vllm"
path = "{path}"
engine = "vllm"
python = "{python}"
engine_args = {{enforce_eager = true}}
dtype = "fp32"
kv_cache_gb = 1
max_model_len = 1024
threads = 1
"""
TOKENS = 400
BODY = {"prompt": "The history of bridges begins with", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


class VllmCluster:
    """A server without replicas of its own, and the nodes that join it."""

    def __init__(self, folder: Path, model: str, nodes: contextlib.ExitStack) -> None:  # noqa: F811
        self._folder, self._nodes = folder, nodes
        self.dir, self.address = folder / "cluster", f"{own_address()}:{free_port()}"
        settings = folder / "syringa.toml"
        settings.write_text(SETTINGS.format(path=os.path.relpath(model), python=os.path.abspath(PYTHON)))
        self.head = Command(
            folder / "head.log",
            *("start", "--no-node", "--port", "0", "--config", str(settings), "--database", str(folder / "syringa.db")),
            *("--cluster-dir", str(self.dir), "--cluster-address", self.address, "--ray-port", str(free_port())),
        )
        nodes.callback(self.head.end)
        self.url = f"http://127.0.0.1:{self.head.until_logged(r'listening host=[^ ]+ port=([0-9]+)')[1]}"
        self.head.until_logged("cluster: listening")

    def join(self, name: str) -> Command:
        token = Command(self._folder / f"{name}.token", "token", "--dir", str(self.dir))
        assert token.process.wait(60) == 0
        node = Command(
            self._folder / f"{name}.log",
            *("join", self.address, "--token", token.log.read_text().strip(), "--name", name, "--cpus", "1"),
            *("--dir", str(self._folder / name)),
            folder=self._folder,
            SYRINGA_HOME=str(self.home(name)),
        )
        self._nodes.callback(node.end)
        node.until_logged("Joined")
        return node

    def home(self, name: str) -> Path:
        return self._folder / f"{name}-home"

    def get(self, path: str) -> list[dict[str, Any]]:
        data = httpx.get(self.url + path, timeout=60).raise_for_status().json()["data"]
        assert isinstance(data, list)
        return data

    def ready_on(self) -> list[str]:
        """Return the nodes with a replica that is ready."""
        return [each["node"] for each in self.get("/admin/replicas") if each["status"] == "ready"]

    def running(self) -> float:
        text = httpx.get(self.url + "/metrics", timeout=60).text
        found = [line for line in text.splitlines() if line.startswith("syringa_num_requests_running{")]
        return sum(float(line.rpartition(" ")[2]) for line in found)

    def processes(self, name: str) -> list[int]:
        return processes_with(CLUSTER_DIR_VARIABLE, str(self._folder / name))

    def workers(self, name: str) -> list[int]:
        """Return the processes of vLLM on a node: the worker and its children."""
        found = []
        for pid in self.processes(name):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if MODULE.encode() in command or b"EngineCore" in command:
                    found.append(pid)
        return found


def until(condition: Callable[[], Any]) -> Any:
    """Poll a condition until it holds. Return its value. Loading takes a minute or more."""
    deadline = time.monotonic() + LOAD_SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "this takes too long"
        time.sleep(0.2)
    return found


@pytest.fixture
def cluster(folder: str, tmp_path: Path) -> Iterator[VllmCluster]:  # noqa: F811
    with contextlib.ExitStack() as nodes:
        yield VllmCluster(tmp_path, folder, nodes)


def test_replica_on_vllm_is_placed_served_and_moved_by_the_drain_of_its_node(cluster: VllmCluster) -> None:
    first = cluster.join("n1")
    until(lambda: cluster.ready_on() == ["n1"])
    assert [path.name for path in cluster.home("n1").rglob("*.safetensors")]  # fetched
    expected = asyncio.run(complete(cluster, BODY))
    assert (expected["status"], expected["finish"], expected["usage"]["completion_tokens"]) == (200, "length", TOKENS)

    # A client that leaves.
    with httpx.stream("POST", cluster.url + "/v1/completions", json={**BODY, "stream": True}, timeout=600) as response:
        lines = response.iter_lines()  # kept: its end would close the connection
        next(lines)
        until(lambda: cluster.running() == 1)
    until(lambda: cluster.running() == 0)

    # The drain of the node, after which there is no other replica until vLLM has started on the next one.
    cluster.join("n2")

    async def run() -> list[dict[str, Any]]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(complete(cluster, {**BODY, "stream": True})),
                group.create_task(complete(cluster, {**BODY, "seed": 1, "temperature": 1, "stream": True})),
            ]
            await asyncio.to_thread(until, lambda: cluster.running() == 2)
            async with httpx.AsyncClient(base_url=cluster.url) as http:
                (await http.post("/admin/nodes/n1/drain", json={"grace": 2})).raise_for_status()
        return [task.result() for task in tasks]

    moved, ended = asyncio.run(run())
    assert (moved["text"], moved["finish"]) == (expected["text"], "length")
    assert moved["usage"]["completion_tokens"] == TOKENS
    assert "cannot continue a request with `seed` elsewhere" in ended["message"]
    assert cluster.ready_on() == ["n2"]
    assert first.process.wait(120) == 0
    assert "This node was drained, and has left the cluster." in first.log.read_text()
    until(lambda: not cluster.processes("n1"))

    # The end of the server ends the replica on the node, with all processes of vLLM.
    assert cluster.workers("n2")
    cluster.head.process.terminate()
    assert cluster.head.process.wait(120) == 0
    until(lambda: not cluster.workers("n2"))


async def complete(cluster: VllmCluster, body: dict[str, Any]) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=LOAD_SECONDS) as http:
        return await answer(http, "/v1/completions", body)
