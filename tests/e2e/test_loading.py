"""How far a model is in being loaded, as the API says it, with a server that loads as far as the test lets it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e import load_gate
from tests.e2e.load_gate import LoadGate
from tests.e2e.server import Server, serve, wait_for

pytestmark = pytest.mark.model

PARTS = 31  # the layers of the default model, and its embedding


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadGate:
    monkeypatch.setenv(load_gate.VARIABLE, str(tmp_path / "gate"))
    return LoadGate(tmp_path / "gate")


@pytest.fixture
def server(gate: LoadGate) -> Iterator[Server]:
    with serve("--served-model-name", "main", "--max-model-len", "256", module=load_gate.MODULE) as running:
        body = {"path": "default", "max_model_len": 512}
        httpx.put(f"{running.url}/admin/models/spare", json=body, timeout=60).raise_for_status()
        yield running


def entries(server: Server) -> list[dict[str, Any]]:
    """Return what both lists say of the model."""
    both = (server.get(path).json()["data"] for path in ("/v1/models", "/admin/models"))
    return [next(each for each in found if each["id"] == "spare") for found in both]


def has_loaded(server: Server, layers: int) -> bool:
    for entry in entries(server):
        if entry["status"] != "loading":
            return False
        loading = entry["loading"]
        if (loading["phase"], loading["fraction"]) != ("weights", int(100 * layers / PARTS) / 100):
            return False
    return True


def is_settled(server: Server, status: str) -> bool:
    return all((each["status"], each["loading"]) == (status, None) for each in entries(server))


def load(server: Server) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/admin/models/spare/load", json={}, timeout=60).raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def test_api_shows_how_far_a_model_is_in_being_loaded(server: Server, gate: LoadGate) -> None:
    assert is_settled(server, "cold")
    gate.close(10)
    begun = load(server)
    assert (begun["status"], begun["loading"]) == ("loading", {"phase": "queued", "fraction": None, "seconds": 0.0})
    wait_for(lambda: has_loaded(server, 10))
    before = entries(server)[0]["loading"]["seconds"]
    gate.close(20)
    wait_for(lambda: has_loaded(server, 20))
    wait_for(lambda: entries(server)[0]["loading"]["seconds"] > before)
    gate.open()
    wait_for(lambda: is_settled(server, "loaded"))

    httpx.post(f"{server.url}/admin/models/spare/unload", json={}, timeout=60).raise_for_status()
    wait_for(lambda: is_settled(server, "cold"))
    gate.close(5)
    load(server)
    wait_for(lambda: has_loaded(server, 5))  # from the beginning
    gate.open()
    wait_for(lambda: is_settled(server, "loaded"))
