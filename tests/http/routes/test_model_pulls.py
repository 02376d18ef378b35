"""Pulls of models, and the removal of what was pulled."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import ModelCard
from syringa.errors import ModelError
from syringa.http.routes import model_pulls
from syringa.modelfiles.download import RemoteFile
from syringa.service import pulls
from tests.api.model_files import write_model_folder
from tests.client import client
from tests.http.routes.ollama_process import file, path, process, pull

__all__ = ["file", "path", "pull"]

PULLS = "/admin/models/pulls"
SOURCE = "org/new"
WEIGHTS = RemoteFile("model.safetensors", 1000, "c" * 64)
Pull = Callable[[Any], None]


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(model_pulls, "measure", lambda model: 1500)
    monkeypatch.setattr(pulls, "PROGRESS_SECONDS", 0.01)
    return tmp_path / "hub"


class Download:
    """Writes a model to the cache of the Hub, half of it at once, the rest when it is told to."""

    def __init__(self, hub: Path, error: Exception | None = None) -> None:
        self.hub, self.error = hub, error
        self.go_on, self.models = threading.Event(), []  # type: threading.Event, list[str]

    def __call__(self, model: str, *, on_file: Callable[[RemoteFile, int], None]) -> None:
        self.models.append(model)
        on_file(WEIGHTS, 500)
        while not self.go_on.wait(0.01):
            on_file(WEIGHTS, 500)  # which ends it when it is canceled
        if self.error is not None:
            raise self.error
        folder = self.hub / "models--org--new" / "snapshots" / "abc"
        folder.mkdir(parents=True, exist_ok=True)
        write_model_folder(folder)
        on_file(WEIGHTS, 1000)


async def wait_for(http: httpx.AsyncClient, id: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    async with asyncio.timeout(60):
        while True:
            found: dict[str, Any] = (await http.get(f"{PULLS}/{id}")).json()
            if condition(found):
                return found
            await asyncio.sleep(0.01)


async def ids(http: httpx.AsyncClient) -> list[str]:
    return [each["id"] for each in (await http.get("/v1/models")).json()["data"]]


async def test_pulled_model_is_served_and_can_be_removed_with_its_files(
    file: str, path: str, pull: Pull, hub: Path
) -> None:
    download = Download(hub)
    pull(download)
    async with process(file, path) as http:
        begun = await http.post("/admin/models/pull", json={"model": f"hf.co/{SOURCE}", "id": "mine"})
        assert begun.status_code == 200, begun.text
        id = begun.json()["id"]
        assert (begun.json()["status"], begun.json()["model"], begun.json()["serve_as"]) == ("running", SOURCE, "mine")
        # Another thread finds out the size of the whole model.
        found = await wait_for(http, id, lambda each: bool(each["files"]) and each["total_bytes"] == 1500)
        assert found["files"] == [{"name": "model.safetensors", "bytes": 1000, "completed_bytes": 500}]
        assert (found["completed_bytes"], found["total_bytes"], found["stage"]) == (500, 1500, "downloading")
        assert (await http.post("/admin/models/pull", json={"model": SOURCE, "id": "mine"})).json()["id"] == id
        assert [each["id"] for each in (await http.get(PULLS)).json()["data"]] == [id]
        assert "mine" not in await ids(http)
        download.go_on.set()
        done = await wait_for(http, id, lambda each: each["status"] != "running")
        assert (done["status"], done["error"], done["completed_bytes"]) == ("completed", None, 1000)
        assert download.models == [SOURCE]
        assert "mine" in await ids(http)
        entry = (await http.get("/admin/models/mine")).json()
        assert (entry["removable"], entry["files"]["deletable"]) == (True, True)
        assert entry["files"]["bytes"] > 0
        await http.put("/admin/models/same", json={"path": SOURCE})
        gone = (await http.delete("/admin/models/mine", params={"files": "true"})).json()
        assert gone == {"id": "mine", "object": "model", "deleted": True, "files_deleted": False}  # the other uses them
        gone = (await http.delete("/admin/models/same", params={"files": "true"})).json()
        assert gone["files_deleted"] is True
        assert os.listdir(hub) == []
        assert (await http.delete(f"{PULLS}/{id}")).json()["status"] == "completed"
        assert (await http.get(f"{PULLS}/{id}")).status_code == 404


async def test_pull_goes_on_without_its_client_and_is_cancelled(file: str, path: str, pull: Pull, hub: Path) -> None:
    pull(Download(hub))
    async with process(file, path) as http, process(file, path) as other:
        id = (await http.post("/admin/models/pull", json={"model": SOURCE})).json()["id"]
        await wait_for(other, id, lambda each: bool(each["files"]))
        await other.delete(f"{PULLS}/{id}")
        found = await wait_for(other, id, lambda each: each["status"] != "running")
        assert (found["status"], found["ended_at"] is not None) == ("cancelled", True)
        assert SOURCE not in await ids(http)


async def test_failed_pull_has_the_reason(file: str, path: str, pull: Pull, hub: Path) -> None:
    download = Download(hub, ModelError("the Hub does not respond"))
    download.go_on.set()
    pull(download)
    async with process(file, path) as http:
        id = (await http.post("/admin/models/pull", json={"model": SOURCE})).json()["id"]
        found = await wait_for(http, id, lambda each: each["status"] != "running")
        assert (found["status"], found["error"]) == ("failed", "The Hub does not respond.")


async def test_ollamas_client_may_pull_the_same_model(file: str, path: str, pull: Pull, hub: Path) -> None:
    download = Download(hub)
    pull(download)
    async with process(file, path) as http:
        id = (await http.post("/admin/models/pull", json={"model": SOURCE})).json()["id"]
        await wait_for(http, id, lambda each: bool(each["files"]))
        pulling = asyncio.create_task(http.post("/api/pull", json={"model": SOURCE, "stream": False}))
        await asyncio.sleep(0)
        download.go_on.set()
        assert (await pulling).json() == {"status": "success"}
        await wait_for(http, id, lambda each: each["status"] == "completed")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": ""}, "model"),
        ({"model": "no-such-model"}, "model"),
        ({"model": "/etc/passwd"}, "model"),
        ({"model": "../x"}, "model"),
        ({"model": SOURCE, "id": "pulls"}, "id"),
        ({"model": SOURCE, "id": "pulls/x"}, "id"),
        ({"model": SOURCE, "id": "default"}, "id"),
        ({"model": SOURCE, "id": 5}, "id"),
    ],
)
async def test_invalid_pull_is_refused(file: str, path: str, pull: Pull, body: dict[str, Any], param: str) -> None:
    def fail(model: str, *, on_file: object) -> None:
        raise AssertionError

    pull(fail)
    async with process(file, path) as http:
        answer = await http.post("/admin/models/pull", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert (await http.get(PULLS)).json()["data"] == []


async def test_available_models_are_listed(file: str, path: str) -> None:
    async with process(file, path) as http:
        found = {each["name"]: each for each in (await http.get("/admin/models/available")).json()["data"]}
        assert found["qwen3-0.6b"]["source"] == "unsloth/Qwen3-0.6B-GGUF:Q4_K_M"
        assert found["qwen3-0.6b"]["present"] is False
        assert found["default"]["source"] is None
        assert found["embedding"]["kind"] == "embed"


async def test_models_that_are_fixed_cannot_be_pulled() -> None:
    async with client() as http:
        answer = await http.post("/admin/models/pull", json={"model": SOURCE})
        assert answer.status_code == 400
        assert (await http.get(f"{PULLS}/x")).status_code == 404


async def test_model_is_loaded_and_unloaded(file: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with process(file, path) as http:
        (id,) = await ids(http)
        (entry,) = (await http.get("/admin/models")).json()["data"]
        assert (entry["status"], entry["removable"], entry["files"]["deletable"]) == ("loaded", False, False)
        assert entry["loaded"]["architecture"] == "Fake"
        assert entry["engine_stats"]["running"] == 0
        assert entry["memory_bytes"] >= entry["files"]["bytes"]
        kept: list[tuple[str, float]] = []
        monkeypatch.setattr(
            "syringa.engine.interface.SingleEngineProvider.keep", lambda self, model, idle: kept.append((model, idle))
        )
        assert (await http.post(f"/admin/models/{id}/unload")).json()["id"] == id
        assert kept == [(id, 0.001)]
        loaded = asyncio.Event()

        async def wait_ready() -> None:
            loaded.set()

        http.engine.ready = False
        http.engine.wait_ready = wait_ready  # type: ignore[method-assign,assignment]
        monkeypatch.setattr("syringa.engine.interface.SingleEngineProvider.status", lambda self, model: "cold")
        monkeypatch.setattr("syringa.http.routes.model_admin.ModelRegistry.show", cold)
        answer = await http.post(f"/admin/models/{id}/load")
        assert (answer.json()["status"], answer.json()["loaded"]) == ("loading", None)
        assert answer.json()["loading"] == {"phase": "queued", "fraction": None, "seconds": 0.0}
        await asyncio.wait_for(loaded.wait(), 60)
        for action in ("load", "unload"):
            assert (await http.post(f"/admin/models/nobody/{action}")).status_code == 404


async def cold(self: object, name: str) -> ModelCard:
    return ModelCard(id=name, created=0, status="cold")
