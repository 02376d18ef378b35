"""What the console reads from a server with several API processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serve, wait_for

pytestmark = [pytest.mark.model, pytest.mark.slow]

REQUESTS = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    database: Path = tmp_path_factory.mktemp("data") / "syringa.db"
    with serve("--workers", "2", "--database", str(database)) as server:
        yield server


def get(server: Server, path: str, **query: Any) -> Any:
    return httpx.get(server.url + path, params=query, timeout=60).raise_for_status().json()


def post(server: Server, path: str, **body: Any) -> Any:
    return httpx.post(server.url + path, json=body, timeout=120).raise_for_status().json()


def test_page_and_its_files_are_served(server: Server) -> None:
    page = httpx.get(server.url + "/", timeout=60)
    assert page.text.startswith("<!doctype html>")
    again = httpx.get(server.url + "/", headers={"if-none-match": page.headers["etag"]}, timeout=60)
    assert again.status_code == 304
    for line in page.text.splitlines():
        for attribute in ('src="', 'href="console/'):
            if attribute in line:
                path = line.partition(attribute)[2].partition('"')[0].removeprefix("console/")
                assert httpx.get(f"{server.url}/console/{path}", timeout=60).status_code == 200, path


def test_caller_without_keys_is_an_administrator(server: Server) -> None:
    assert get(server, "/v1/me")["scopes"] == ["inference", "admin"]


def test_figures_of_all_processes_add_up(server: Server) -> None:
    """Each connection goes to one of the two processes, and each of them stores its own figures."""
    for number in range(REQUESTS):
        post(server, "/v1/responses", input=f"Say {number}.", max_output_tokens=8)

    found: dict[str, Any] = {}

    def complete() -> bool:
        found.update(get(server, "/admin/series", range="15m")["all"]["totals"])  # a process keeps it for a while
        return bool(found["ok"] == REQUESTS)

    wait_for(complete)
    assert 0 < found["output_tokens"] <= 8 * REQUESTS
    assert 0 < found["ttft_p50"] <= found["ttft_p99"]
    assert found["errors"] == {}
    wait_for(lambda: len(get(server, "/v1/responses", limit=100)["data"]) == REQUESTS)


def test_model_is_unloaded_and_loaded(server: Server) -> None:
    with httpx.Client(base_url=server.url, timeout=120) as http:  # one connection, and so one of the two processes

        def model() -> Any:
            (found,) = http.get("/admin/models").raise_for_status().json()["data"]
            return found

        wait_for(lambda: model()["status"] == "loaded")
        before = model()
        assert before["removable"] is False
        assert before["memory_bytes"] > before["files"]["bytes"]
        path = f"/admin/models/{before['id']}"
        http.post(f"{path}/unload", json={}).raise_for_status()

        def is_unloaded() -> bool:
            found = http.get(path).json()
            return (found["status"], found["loaded"]) == ("cold", None)

        wait_for(is_unloaded)
        assert http.post(f"{path}/load", json={}).raise_for_status().json()["status"] == "loading"
        wait_for(lambda: http.get(path).json()["status"] == "loaded")
