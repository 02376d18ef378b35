"""`/api/pull` of Ollama's API."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from syringa.errors import ModelError
from syringa.modelfiles import hub as hub_module
from syringa.modelfiles.download import RemoteFile
from tests.http.routes.ollama_process import MODEL, file, names, path, process, prompt_of, pull, statuses
from tests.modelfiles.fake_hub import FakeHub, fake_hub

__all__ = ["file", "path", "pull"]  # fixtures


async def test_pulled_model_is_served_under_its_name(
    file: str, path: str, pull: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / "0123456789"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    half, whole = ((RemoteFile("model.safetensors", 4, "0" * 64), size) for size in (2, 4))

    def download(model: str, *, on_file: Callable[[RemoteFile, int], None]) -> None:
        assert model == "org/model"
        on_file(*half)
        shutil.copytree(path, snapshot, dirs_exist_ok=True)
        on_file(*whole)

    pull(download)
    async with process(file, path) as http:
        answer = await http.post("/api/pull", json={"model": "hf.co/org/model"})
        found = statuses(answer)
        assert found[0] == "pulling manifest"
        assert found[1:-3] == ["pulling 000000000000"] * 2
        assert found[-3:] == ["verifying sha256 digest", "writing manifest", "success"]
        line = json.loads(answer.text.splitlines()[2])
        assert (line["digest"], line["total"], line["completed"]) == (f"sha256:{'0' * 64}", 4, 4)
        assert await names(http) == [f"{MODEL}:latest", "hf.co/org/model:latest"]
        assert await prompt_of(http, "hf.co/org/model") == "<u>aa<a>"
        again = {"name": "hf.co/org/model:latest", "stream": False, "insecure": True}
        answer = await http.post("/api/pull", json=again)
        assert (answer.json(), answer.headers["x-syringa-ignored"]) == ({"status": "success"}, "insecure")
        assert len(await names(http)) == 2


async def test_failed_pull_is_an_error_line_or_a_status(file: str, path: str, pull: Callable[[Any], None]) -> None:
    def fail(model: str, *, on_file: Callable[[RemoteFile, int], None]) -> None:
        raise ModelError("the Hub does not respond")

    pull(fail)
    async with process(file, path) as http:
        found = await http.post("/api/pull", json={"model": "hf.co/a/b:Q4_0"})
        assert json.loads(found.text.splitlines()[-1]) == {"error": "The Hub does not respond."}
        answer = await http.post("/api/pull", json={"model": "hf.co/a/b:Q4_0", "stream": False})
        assert (answer.status_code, answer.json()) == (424, {"error": "The Hub does not respond."})
        missing = await http.post("/api/pull", json={"model": "llama3.2"})
        assert (missing.status_code, missing.json()) == (404, {"error": "model 'llama3.2' not found"})


async def test_pull_of_a_name_that_a_model_has_adds_none(
    file: str, path: str, pull: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = tmp_path / "hub" / "models--claude--x" / "snapshots" / "0123456789"
    shutil.copytree(path, snapshot)
    pull(lambda model, *, on_file: None)
    async with process(file, path) as http:
        await http.put("/admin/models/real", json={"path": path, "aliases": ["qwen3-0.6b", "claude/*"]})
        for name in ("qwen3-0.6b", "default"):
            assert statuses(await http.post("/api/pull", json={"model": name}))[-1] == "success"
        assert await names(http) == [f"{MODEL}:latest", "real:latest"]
        assert statuses(await http.post("/api/pull", json={"model": "claude/x"}))[-1] == "success"  # like a pattern
        assert {*await names(http)} == {f"{MODEL}:latest", "real:latest", "claude/x:latest"}


@pytest.fixture
def hub(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A Hub with one model, whose files are downloaded to a folder of the test."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub_module.download, "__defaults__", (lambda seconds: None,))  # no waiting between attempts
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with fake_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.repositories["org/small"] = {each.name: each.read_bytes() for each in Path(path).iterdir()}
        yield server


async def test_model_of_the_hub_is_downloaded_and_served(file: str, path: str, hub: FakeHub) -> None:
    weights = hub.repositories["org/small"]["model.safetensors"]
    hub.statuses = [503]  # which is tried again
    async with process(file, path) as http:
        answer = await http.post("/api/pull", json={"model": "hf.co/org/small"})
        found = [json.loads(line) for line in answer.text.splitlines()]
        assert found[-1] == {"status": "success"}
        done = {line["digest"]: (line["completed"], line["total"]) for line in found if "digest" in line}
        assert len(done) == len(hub.fetched()) == 4
        assert all(completed == total for completed, total in done.values())
        assert len(weights) in [total for _, total in done.values()]
        assert await prompt_of(http, "hf.co/org/small:latest") == "<u>aa<a>"
        requests = len(hub.requests)
        assert statuses(await http.post("/api/pull", json={"model": "hf.co/org/small"}))[-1] == "success"
        assert len(hub.requests) == requests  # it is here
        missing = await http.post("/api/pull", json={"model": "hf.co/org/nothing", "stream": False})
        assert (missing.status_code, "not on the Hugging Face Hub" in missing.json()["error"]) == (424, True)
