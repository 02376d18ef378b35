"""Hostile requests to Ollama's endpoints: wrong types, broken bodies, and names that are paths."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.api.openapi.document import request_fields
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_app
from syringa.http.endpoints import ENDPOINTS
from syringa.modelfiles.download import RemoteFile
from tests.chat_models import plain_model
from tests.embedding_models import embedding_model
from tests.fake_engine import FakeEngine
from tests.http.routes.ollama_process import MODEL, Client, file, names, path, process, pull

__all__ = ["file", "path", "pull"]  # fixtures

VALUES: tuple[Any, ...] = (
    *("", "x", "\0", "x" * 10_000, "☃", 0, -1, 1, 1.5, 10**30, -(10**30), 1e300, True, False),
    *(
        [],
        [None],
        [[]],
        [{}],
        ["x"],
        [""],
        [1],
        [-1],
        [1.5],
        [10**30],
        [True],
        {},
        {"x": 1},
        {"": None},
        {"x": {"x": []}},
    ),
    [{"role": "user", "content": "x"}],
    [{"role": "tool", "content": "x"}],
    [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
    {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}},
)
VALID: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    "/api/generate": {"model": "fake", "prompt": "hi", "raw": False},
    "/api/embed": {"model": "tiny", "input": "hi"},
    "/api/embeddings": {"model": "tiny", "prompt": "hi"},
    "/api/show": {"model": "fake"},
    "/api/create": {"model": "new", "from": "fake"},
    "/api/copy": {"source": "fake", "destination": "new"},
    "/api/pull": {"model": "org/model", "stream": False},
    "/api/delete": {"model": "fake"},
}
NAMES = (
    *(
        "../../x",
        "..",
        "/etc/passwd",
        "//x",
        "a/../../b",
        "./x",
        "~/x",
        "~nobody-at-all/x",
        "\0",
        "a\0b",
        "a\nb",
        "a b",
    ),
    *(
        "a" * 300,
        "a" * 100_000,
        "a/" * 5000,
        f"{'a' * 300}/b",
        "C:\\x",
        "file:///etc/passwd",
        "hf.co/../../etc",
        "hf.co/",
    ),
    *(":latest", "%2e%2e/x", "..%2fx", "\u202e", "*", "claude-*", "-rf", "--help", "$(x)", "'; --", "🙂"),
)
CHANGING = ("/api/create", "/api/copy", "/api/pull", "/api/delete")  # refused as a whole for a fixed model
METHODS = {each.path: each.method for each in ENDPOINTS if each.path in VALID}


def all_models() -> httpx.AsyncClient:
    app = create_app(
        Config(), SingleEngineProvider(FakeEngine("hello")), FixedModels([plain_model(), embedding_model()])
    )
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


def check(answer: httpx.Response, what: object) -> None:
    """Assert that a request was answered or refused, and refused in Ollama's shape."""
    assert answer.status_code < 500, (what, answer.text)
    if answer.status_code >= 400:
        assert answer.json().keys() == {"error"}, what
        assert type(answer.json()["error"]) is str
        assert len(answer.json()["error"]) < 2000, what


def wire_type(path: str) -> Any:
    (operation,) = [each.operation for each in ENDPOINTS if each.path == path]
    assert operation is not None
    return operation.request


@pytest.mark.slow
@pytest.mark.parametrize("path", VALID)
async def test_wrong_values_are_refused_by_their_names(path: str) -> None:
    fields = [*request_fields(wire_type(path)), "unknown"]
    assert len(fields) > 2
    async with all_models() as http:
        for name in fields:
            for value in VALUES:
                body = VALID[path] | {name: value}
                answer = await http.request(METHODS[path], path, json=body)
                check(answer, (name, value))
                if answer.status_code == 400 and path not in CHANGING:
                    named = (name, "maximum context length", "model is required", '"fake" does not support')
                    assert any(each in answer.json()["error"] for each in named), (name, value, answer.text)


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/api/chat", "/api/embed", "/api/create"])
async def test_wrong_options_are_refused_by_their_names(path: str) -> None:
    field = "parameters" if path == "/api/create" else "options"
    async with all_models() as http:
        for name in [*request_fields(wire_type(path))[field]["properties"], "x" * 100_000, "\0", "é\n, x"]:
            for value in VALUES:
                answer = await http.post(path, json=VALID[path] | {field: {name: value}})
                check(answer, (name[:20], value))
                if answer.status_code == 400 and path not in CHANGING:
                    named = (f"{field}.{name}", "maximum context length is 1 tokens")
                    assert any(each in answer.json()["error"] for each in named), (name, value, answer.text)


@pytest.mark.parametrize("path", VALID)
async def test_broken_bodies_are_refused(path: str) -> None:
    bodies: tuple[bytes, ...] = (
        *(
            b"",
            b"{",
            b"[]",
            b"null",
            b"1",
            b'"x"',
            b"\xff",
            b"{}{}",
            b'{"model": "fake"}\n{"model": "fake"}',
            b"[" * 10_000,
        ),
        *(
            b'{"model": NaN}',
            b'{"model": "\\ud800"}',
            b'{"model": 1e999}',
            b'{"name": 1e999}',
            b'{"a":' * 10_000,
            b"model=fake&prompt=hi",
        ),
        b'{"model": ' + b"9" * 5000 + b', "name": ' + b"9" * 5000 + b"}",
        json.dumps(VALID[path]).encode()[:-1],
    )
    async with all_models() as http:
        for body in bodies:
            for kind in ("application/json", "application/x-www-form-urlencoded"):
                answer = await http.request(METHODS[path], path, content=body, headers={"content-type": kind})
                check(answer, body[:60])
                assert answer.status_code in (400, 404, 413), (body[:60], answer.text)
        refused = await http.request(METHODS[path], path, content=b"{}", headers={"content-type": "text/plain"})
        assert (refused.status_code, type(refused.json()["error"])) == (415, str)


@pytest.fixture
async def pulled(
    file: str, path: str, pull: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[tuple[Client, list[str]]]:
    """A process in a folder with secrets, and the names that were downloaded from it."""
    found: list[str] = []

    def download(model: str, *, on_file: Callable[[RemoteFile, int], None]) -> None:
        found.append(model)

    pull(download)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    (tmp_path / "x").write_text("secret")
    monkeypatch.chdir(tmp_path / "work")
    async with process(file, path) as http:
        yield http, found


def snapshot(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder but the database."""
    return {
        str(each.relative_to(folder)): each.read_bytes()
        for each in folder.rglob("*")
        if each.is_file() and not str(each.relative_to(folder)).startswith("syringa.db")
    }


async def test_names_that_are_paths_reach_no_file(pulled: tuple[Client, list[str]], tmp_path: Path) -> None:
    http, downloaded = pulled
    before = snapshot(tmp_path)
    for name in (*NAMES, str(tmp_path / "x"), "../x", f"../{MODEL}", f"{tmp_path / MODEL}/config.json"):
        bodies: list[tuple[str, str, dict[str, Any]]] = [
            ("POST", "/api/pull", {"model": name}),
            ("POST", "/api/pull", {"name": name, "stream": False}),
            ("POST", "/api/create", {"model": name, "from": MODEL}),
            ("POST", "/api/create", {"model": "new", "from": name}),
            ("POST", "/api/copy", {"source": MODEL, "destination": name}),
            ("POST", "/api/copy", {"source": name, "destination": "new"}),
            ("DELETE", "/api/delete", {"model": name}),
            ("POST", "/api/show", {"model": name}),
            ("POST", "/api/chat", {"model": name, "messages": [{"role": "user", "content": "a"}]}),
            ("POST", "/api/generate", {"model": name, "prompt": "a"}),
            ("POST", "/api/embed", {"model": name, "input": "a"}),
        ]
        for method, endpoint, body in bodies:
            answer = await http.request(method, endpoint, json=body)
            check(answer, (endpoint, name[:40]))
            assert answer.status_code in (400, 404), (endpoint, body, answer.text)
    assert downloaded == []
    assert await names(http) == [f"{MODEL}:latest"]
    assert snapshot(tmp_path) == before


async def test_blobs_and_unknown_paths_are_refused_in_ollamas_shape() -> None:
    async with all_models() as http:
        for digest in ("sha256:00", "..%2f..%2fx", "%00", "x" * 3000):
            check(await http.post(f"/api/blobs/{digest}", content=b"x"), digest)
            assert (await http.head(f"/api/blobs/{digest}")).status_code == 404
        for method, path in [("GET", "/api/nothing"), ("POST", "/api/me"), ("GET", "/api/chat"), ("PUT", "/api/tags")]:
            answer = await http.request(method, path)
            check(answer, path)
            assert answer.status_code in (404, 405)
        other = await http.get("/api/v2/nothing")
        assert other.json()["error"]["type"] == "not_found_error"  # of another API
