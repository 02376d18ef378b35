"""Several models in one server: loaded on demand, unloaded when idle."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, alive, serve, wait_for

pytestmark = [pytest.mark.model, pytest.mark.slow]

WORKER = "syringa.engine.worker.server"
# The same files with different context lengths, hence different workers.
TWO = """
drain_timeout = 2
[[models]]
id = "first"
path = "default"
max_model_len = 1024
kv_cache_tokens = 4096
[[models]]
id = "second"
path = "default"
aliases = ["other"]
max_model_len = 512
kv_cache_tokens = 2048
idle_seconds = 20
prices = {input = 1, output = 2}
defaults = {max_tokens = 5, temperature = 0.0}
[[models]]
id = "broken"
path = "/no/such/model"
"""


def config(folder: Path, more: str = "") -> str:
    path = folder / "models.toml"
    path.write_text(more + TWO)
    return str(path)


def complete(server: Server, model: str, **body: Any) -> httpx.Response:
    body = {"model": model, "prompt": "The capital of France is", "ignore_eos": True, **body}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=300)


def entries(server: Server) -> dict[str, Any]:
    return {each["id"]: each for each in httpx.get(server.url + "/v1/models", timeout=120).json()["data"]}


def test_cold_model_is_loaded_used_unloaded_and_loaded_again(tmp_path: Path) -> None:
    with serve("--config", config(tmp_path), "--workers", "2") as server:
        listed: dict[str, Any] = {}

        def is_listed() -> bool:
            listed.update(entries(server))  # of one of the two API processes
            return [each["status"] for each in listed.values()] == ["loaded", "cold", "failed"]

        wait_for(is_listed)
        assert [each["context_length"] for each in listed.values()] == [1024, 512, None]
        assert listed["second"]["aliases"] == ["other"]
        assert listed["second"]["prices"] == {"input": 1.0, "cached_input": 1.0, "output": 2.0}
        (first,) = server.children(WORKER)

        answer = complete(server, "other")
        assert answer.status_code == 200
        assert answer.json()["model"] == "second"
        assert answer.json()["usage"]["completion_tokens"] == 5  # the default of the model
        (second,) = set(server.children(WORKER)) - {first}

        wait_for(lambda: server.children(WORKER) == [first])
        assert not alive(second)
        wait_for(lambda: entries(server)["second"]["status"] == "cold")

        again = complete(server, "second")
        assert again.json()["choices"][0]["text"] == answer.json()["choices"][0]["text"]
        assert complete(server, "first", max_tokens=3).json()["usage"]["completion_tokens"] == 3

        refused = complete(server, "broken")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "model_unavailable"
        assert "/" not in refused.json()["error"]["message"]  # paths of the server are for its log
        wait_for(lambda: "no such file" in server.log.read_text())
        assert "/no/such/model" in server.get("/admin/models/broken").json()["error"]
        assert server.get("/admin/models/second").json()["error"] is None
        assert not [each for each in entries(server).values() if "/no/such" in str(each)]
        assert complete(server, "unknown").status_code == 404


def test_models_evict_each_other_when_one_may_be_loaded(tmp_path: Path) -> None:
    with serve("--config", config(tmp_path, "max_loaded = 1\n")) as server:
        wait_for(lambda: entries(server)["first"]["status"] == "loaded")
        names = ["first", "second"] * 4
        with ThreadPoolExecutor(len(names)) as pool:
            answers = list(pool.map(lambda name: complete(server, name, max_tokens=40, temperature=0), names))
        assert [answer.status_code for answer in answers] == [200] * len(names), [each.text for each in answers]
        assert [answer.json()["usage"]["completion_tokens"] for answer in answers] == [40] * len(names)
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
        wait_for(lambda: len(server.children(WORKER)) <= 1)  # the last one is unloaded when it is idle


def test_workers_exit_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    with serve("--config", config(tmp_path)) as server:
        assert complete(server, "first").status_code == 200
        assert complete(server, "second").status_code == 200
        children = server.children()
        assert len(server.children(WORKER)) == 2
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        wait_for(lambda: not any(alive(child) for child in children))
