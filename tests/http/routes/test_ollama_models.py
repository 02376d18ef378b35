"""Ollama's endpoints about models, on the fake engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.api.ollama.files import read_facts
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.errors import StartupError
from syringa.http.server.listener import listen, listen_for_ollama
from syringa.http.server.server import serve_api
from syringa.service.app_state import AppState
from tests.chat_models import plain_model
from tests.client import client, until
from tests.fake_engine import FakeEngine
from tests.http.routes.ollama_process import HI, MODEL, file, names, path, process, prompt_of, pull, statuses

__all__ = ["file", "path", "pull"]  # fixtures

SMOLLM2 = "SmolLM2-135M-Instruct"


async def test_version_and_lists_are_read_with_get_and_head() -> None:
    async with client() as http:
        assert (await http.get("/api/version")).json()["version"].count(".") == 2
        for path in ("/api/tags", "/api/version", "/api/ps", "/"):
            assert (await http.head(path)).status_code == 200
        (entry,) = (await http.get("/api/tags")).json()["models"]
        assert (entry["name"], entry["model"]) == ("fake:latest", "fake:latest")
        assert len(entry["digest"]) == 64  # clients cut it, also where there are no files


def test_files_that_cannot_be_read_have_a_digest_of_their_path(tmp_path: Path) -> None:
    first, second = (read_facts(str(tmp_path / name)).digest for name in ("a", "b"))
    assert len(first) == len(second) == 64
    assert first != second


async def test_push_and_blobs_are_refused_by_name() -> None:
    async with client() as http:
        push = await http.post("/api/push", json={"model": "fake"})
        blob = await http.post("/api/blobs/sha256:00", content=b"x", headers={"content-type": "application/x-x"})
        assert (push.status_code, "pushed" in push.json()["error"]) == (400, True)
        assert (blob.status_code, "uploaded" in blob.json()["error"]) == (400, True)
        assert (await http.head("/api/blobs/sha256:00")).status_code == 404


async def test_models_that_are_fixed_cannot_be_changed() -> None:
    async with client(model=plain_model()) as http:
        seen = [
            await http.post("/api/create", json={"model": "a", "from": "fake"}),
            await http.post("/api/copy", json={"source": "fake", "destination": "a"}),
            await http.request("DELETE", "/api/delete", json={"model": "fake"}),
            await http.post("/api/pull", json={"model": "qwen3-0.6b"}),
        ]
    assert [each.status_code for each in seen] == [400] * 4
    assert all("run time" in each.json()["error"] for each in seen)


@pytest.mark.model
async def test_tags_show_and_ps_describe_the_files(file: str) -> None:
    async with process(file, "default") as http:
        (entry,) = (await http.get("/api/tags")).json()["models"]
        (running,) = (await http.get("/api/ps")).json()["models"]
        answer = await http.post("/api/show", json={"name": f"{SMOLLM2}:latest", "verbose": True})
        assert (await http.post("/api/show", json={"model": "other"})).status_code == 404
        assert (await http.post("/api/show", json={})).json() == {"error": "model is required"}
    assert entry["name"] == f"{SMOLLM2}:latest"
    assert entry["size"] > 90_000_000
    assert len(entry["digest"]) == 64
    assert entry["details"] == {
        "parent_model": "",
        "format": "gguf",
        "family": "llama",
        "families": ["llama"],
        "parameter_size": "134.52M",
        "quantization_level": "Q4_1",
    }
    assert entry["capabilities"] == ["completion", "tools"]
    assert (running["name"], running["digest"], running["size_vram"]) == (entry["name"], entry["digest"], 0)
    assert running["context_length"] == 8192
    assert running["expires_at"] > "2100"  # it is not unloaded
    shown = answer.json()
    assert answer.headers["x-syringa-ignored"] == "verbose"
    assert shown["details"] == entry["details"]
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["model_info"]["general.architecture"] == "llama"
    assert shown["model_info"]["llama.context_length"] == 8192
    assert shown["model_info"]["llama.embedding_length"] == 576
    assert "im_start" in shown["template"]
    assert shown["modelfile"].splitlines()[1] == f"FROM {SMOLLM2}:latest"  # no path of the server


async def test_created_model_adds_system_messages_and_parameters_everywhere(file: str, path: str) -> None:
    body = {
        "model": "mario",
        "from": MODEL,
        "system": "A.",
        "messages": [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c!"}],
        "parameters": {"temperature": 0.25, "num_ctx": 128, "num_predict": 9, "stop": ["mm"], "mirostat": 2},
        "license": ["MIT", "Apache"],
    }
    prompt = "<s>A.<u>b<a>c!<u>aa<a>"
    async with process(file, path) as http, process(file, path) as other:
        answer = await http.post("/api/create", json=body)
        assert statuses(answer) == ["reading model metadata", "writing manifest", "success"]
        assert answer.headers["x-syringa-ignored"] == "parameters.mirostat"
        large = {"model": "luigi", "from": "mario", "parameters": {"num_ctx": 10_000, "num_predict": -1}}
        answer = await http.post("/api/create", json=large)
        assert answer.headers["x-syringa-ignored"] == "parameters.num_ctx"
        shown = (await http.post("/api/show", json={"model": "luigi"})).json()
        assert (shown["model_info"]["llama.context_length"], "num_predict" in shown["parameters"]) == (256, False)
        assert (await http.request("DELETE", "/api/delete", json={"model": "luigi"})).status_code == 200
        assert await names(http) == [f"{MODEL}:latest", "mario:latest"]

        async def known() -> bool:
            return "mario:latest" in await names(other)

        await until(known)
        for endpoint in ("/api/chat", "/v1/chat/completions"):
            assert await prompt_of(other, "mario", endpoint=endpoint) == prompt
            request = other.engine.requests[-1]
            assert (request.sampling.temperature, request.stopping.max_tokens) == (0.25, 9)
        own = await prompt_of(http, "mario:latest", [{"role": "system", "content": "B"}, *HI])
        assert own == prompt.replace("A.", "B")
        generated = await http.post("/api/generate", json={"model": "mario", "prompt": "aa", "stream": False})
        assert generated.json()["prompt_eval_count"] == len(prompt)
        more = {"model": "mario", "prompt": "b", "context": [4], "stream": False}
        await http.post("/api/generate", json=more)
        assert len(http.engine.requests[-1].prompt) == 1 + len("<u>b<a>")  # the rest is part of the context
        shown = (await http.post("/api/show", json={"model": "mario"})).json()
        assert (shown["system"], shown["license"], shown["messages"]) == ("A.", "MIT\n\nApache", body["messages"])
        assert sorted(line.split() for line in shown["parameters"].splitlines()) == [
            ["num_ctx", "128"],
            ["num_predict", "9"],
            ["stop", '"mm"'],
            ["temperature", "0.25"],
        ]
        assert shown["model_info"]["llama.context_length"] == 128
        assert 'SYSTEM """A."""' in shown["modelfile"]
    async with process(file, path) as http:  # after a restart
        assert await prompt_of(http, "mario") == prompt


async def test_model_is_created_over_another_copied_replaced_and_deleted(file: str, path: str) -> None:
    async with process(file, path) as http:
        await http.post("/api/create", json={"model": "a", "from": MODEL, "system": "A", "parameters": {"top_k": 3}})
        template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
        body = {"name": "b:latest", "from": "a:latest", "template": template, "parameters": {"top_p": 0.5}}
        assert (await http.post("/api/create", json=body | {"stream": False})).json() == {"status": "success"}
        assert await prompt_of(http, "b") == "<A><aa>"
        sampling = http.engine.requests[-1].sampling
        assert (sampling.top_k, sampling.top_p) == (3, 0.5)
        copied = await http.post("/api/copy", json={"source": "b", "destination": "c"})
        assert (copied.status_code, copied.content) == (200, b"")
        await http.post("/api/create", json={"model": "b", "from": "b", "system": "B"})
        assert (await prompt_of(http, "b"), await prompt_of(http, "c")) == ("<B><aa>", "<A><aa>")
        for name in ("a", "b:latest"):
            assert (await http.request("DELETE", "/api/delete", json={"model": name})).status_code == 200
        assert await names(http) == [f"{MODEL}:latest", "c:latest"]
        assert await prompt_of(http, "c") == "<A><aa>"
        missing = await http.request("DELETE", "/api/delete", json={"model": "a"})
        assert (missing.status_code, missing.json()) == (404, {"error": "model 'a' not found"})
        fixed = await http.request("DELETE", "/api/delete", json={"model": MODEL})
        assert (fixed.status_code, "settings" in fixed.json()["error"]) == (400, True)


async def test_model_is_deleted_by_its_own_name_only(file: str, path: str) -> None:
    async with process(file, path) as http:
        await http.put("/admin/models/real", json={"path": path, "aliases": ["other", "claude-*"]})
        for name in ("other", "claude-3", "default", "claude-*", ":latest"):
            answer = await http.request("DELETE", "/api/delete", json={"model": name})
            assert (answer.status_code, answer.json()) == (404, {"error": f"model '{name}' not found"})
        assert await names(http) == [f"{MODEL}:latest", "real:latest"]


INVALID: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "model is required"),
    ({"model": "a"}, 400, "from"),
    ({"model": "a", "from": "other"}, 404, "model 'other' not found"),
    ({"model": MODEL, "from": MODEL}, 400, "settings"),
    ({"model": "a b", "from": MODEL}, 400, "invalid model name"),
    ({"model": "default", "from": MODEL}, 400, "reserved"),
    ({"model": "pulls", "from": MODEL}, 400, "reserved"),  # whose path is that of another endpoint of the admin API
    ({"model": "pulls/a", "from": MODEL}, 400, "reserved"),
    ({"model": "a", "from": MODEL, "template": "{{ .System }}"}, 400, "Go template"),
    ({"model": "a", "from": MODEL, "template": "{% for %}"}, 400, "template"),
    ({"model": "a", "from": MODEL, "parameters": {"temperature": 9}}, 400, "parameters.temperature"),
    ({"model": "a", "from": MODEL, "parameters": {"stop": [""]}}, 400, "parameters.stop"),
    ({"model": "a", "from": MODEL, "messages": [{"role": "tool", "content": ""}]}, 400, "messages[0].role"),
    ({"model": "a", "from": MODEL, "license": 1}, 400, "license"),
    ({"model": "a", "from": MODEL, "quantize": "q4_K_M"}, 400, "quantize"),
    ({"model": "a", "from": MODEL, "files": {"a": "sha256:0"}}, 400, "files"),
    ({"model": "a", "from": MODEL, "adapters": {"a": "sha256:0"}}, 400, "adapters"),
    ({"model": "a", "modelfile": "FROM x"}, 400, "modelfile"),
]


async def test_invalid_creation_is_refused(file: str, path: str) -> None:
    async with process(file, path) as http:
        for body, status, message in INVALID:
            answer = await http.post("/api/create", json=body)
            assert (answer.status_code, message in answer.json()["error"]) == (status, True), (body, answer.text)
        assert len(await names(http)) == 1


async def test_model_that_is_kept_for_long_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SingleEngineProvider, "idle_timeout", lambda self, model: 1e300)
    async with client() as http:
        (entry,) = (await http.get("/api/ps")).json()["models"]
    assert entry["expires_at"] > "2100"


async def test_root_is_ollamas_on_its_own_port_only() -> None:
    config = Config(port=0, ollama_port=0, drain_timeout=1.0)
    listener, ollama_listener = listen(config), listen_for_ollama(config)
    assert ollama_listener is not None
    models = FixedModels([plain_model()])
    serving = asyncio.create_task(
        serve_api(config, SingleEngineProvider(FakeEngine("x")), models, listener, AppState(config), ollama_listener)
    )
    answers = []
    for each in (listener, ollama_listener):
        base_url = f"http://127.0.0.1:{each.getsockname()[1]}"
        async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=60) as http:
            assert (await http.head("/")).status_code == 200
            assert (await http.get("/v1/models")).json()["data"][0]["id"] == "fake"
            assert (await http.get("/api/tags")).json()["models"][0]["name"] == "fake:latest"
            answers.append((await http.get("/")).text.partition("\n")[0])
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    assert answers == ["<!doctype html>", "Ollama is running"]


def test_ollama_port_is_off_by_default_and_named_if_it_is_taken() -> None:
    assert listen_for_ollama(Config()) is None
    with listen(Config(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match="--ollama-port"):
            listen_for_ollama(Config(ollama_port=port))


@pytest.mark.parametrize(
    ("method", "endpoint", "body"),
    [
        ("POST", "/api/pull", {"model": "hf.co/org/model"}),
        ("POST", "/api/create", {"model": "mine", "from": MODEL, "system": "Be brief."}),
        ("POST", "/api/copy", {"source": MODEL, "destination": "mine"}),
        ("DELETE", "/api/delete", {"model": "kept"}),
    ],
)
async def test_key_that_is_not_of_an_administrator_changes_no_models(
    file: str, path: str, pull: Callable[[Any], None], method: str, endpoint: str, body: dict[str, Any]
) -> None:
    pulled: list[str] = []
    pull(lambda model, *, on_file: pulled.append(model))
    async with process(file, path) as http:  # without keys, everyone is an administrator
        assert (await http.post("/api/copy", json={"source": MODEL, "destination": "kept"})).status_code == 200
    async with process(file, path, api_key=("secret",)) as http:
        for headers, status in (({}, 401), ({"authorization": "Bearer secret"}, 403)):
            answer = await http.request(method, endpoint, json=body, headers=headers)
            assert answer.status_code == status, answer.text
            assert type(answer.json()["error"]) is str
        http.headers["authorization"] = "Bearer secret"
        assert await names(http) == [f"{MODEL}:latest", "kept:latest"]
    assert pulled == []
