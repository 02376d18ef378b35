"""`syringa nodes` and `syringa pools`."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.cli.test_replicas import FakeAdminApi

NODE = {
    "object": "node",
    "name": "gpu-1",
    "state": "ready",
    "pool": "night",
    "offered": False,
    "reason": "its owner uses 80 % of a GPU",
    "gpus": 2,
    "cpus": None,
    "memory": None,
    "replicas": 0,
    "labels": {"pool": "night"},
}
POOL = {
    "object": "pool",
    "name": "night",
    "state": "inactive",
    "reason": "outside of its windows",
    "mode": "scheduled",
    "override": None,
    "changes_at": 1769806800,
    "nodes": 3,
    "offered": 0,
    "gpus": 6,
    "gpus_used": 0,
    "cpus": 0,
    "cpus_used": 0,
    "replicas": 0,
}


def serve(monkeypatch: pytest.MonkeyPatch, *entries: Any) -> FakeAdminApi:
    fake = FakeAdminApi(body={"object": "list", "data": list(entries)})
    monkeypatch.setattr(httpx, "request", fake)
    return fake


def test_nodes_list_prints_a_table_or_json(syringa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(monkeypatch, NODE)
    title, row = syringa("nodes", "list").out.splitlines()
    assert title.split() == ["name", "state", "pool", "offered", "gpus", "cpus", "replicas", "reason"]
    assert row.split() == [
        "gpu-1",
        "ready",
        "night",
        "no",
        "2",
        "0",
        "its",
        "owner",
        "uses",
        "80",
        "%",
        "of",
        "a",
        "GPU",
    ]
    assert server.requests == [("GET", "http://127.0.0.1:8000/admin/nodes", {}, None)]
    assert json.loads(syringa("nodes", "list", "--json").out) == [NODE]


def test_nodes_drain_sends_the_grace(syringa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(monkeypatch)
    result = syringa("nodes", "drain", "gpu/1", "--grace", "5", "--api-key", "secret")
    assert (result.status, result.out) == (0, "gpu/1 is draining\n")
    syringa("nodes", "drain", "gpu-1")
    url = "http://127.0.0.1:8000/admin/nodes"
    assert server.requests == [
        ("POST", f"{url}/gpu%2F1/drain", {"authorization": "Bearer secret"}, {"grace": 5.0}),
        ("POST", f"{url}/gpu-1/drain", {}, {}),
    ]


def test_pools_list_prints_a_table_or_json(syringa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, POOL, POOL | {"name": "always", "changes_at": None, "mode": "always", "reason": None})
    title, night, always = syringa("pools", "list").out.splitlines()
    assert title.split()[:5] == ["name", "state", "mode", "override", "nodes"]
    assert night.split()[:7] == ["night", "inactive", "scheduled", "3", "0", "0/6", "0/0"]
    assert "2026-01-3" in night
    assert "2026" not in always
    assert json.loads(syringa("pools", "list", "--json").out)[0] == POOL


@pytest.mark.parametrize(
    ("action", "message"),
    [("open", "night is open"), ("close", "night is closing"), ("reset", "night follows its schedule")],
)
def test_pools_are_opened_closed_and_reset(
    syringa: Any, monkeypatch: pytest.MonkeyPatch, action: str, message: str
) -> None:
    server = serve(monkeypatch)
    result = syringa("pools", action, "night", "--url", "http://host:1")
    assert (result.status, result.out) == (0, message + "\n")
    assert server.requests == [("POST", f"http://host:1/admin/pools/night/{action}", {}, None)]


def test_errors_of_the_server_are_one_line(syringa: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeAdminApi(404, {"error": {"message": "There is no pool 'x'."}})
    monkeypatch.setattr(httpx, "request", fake)
    result = syringa("pools", "open", "x")
    assert result.status != 0
    assert result.err.strip().endswith("the server answered 404: There is no pool 'x'.")
