from __future__ import annotations

from typing import Any

import pytest

from syringa.config import Config
from tests.client import client

KEYS: dict[str, Any] = {"api_key": ("k",)}


@pytest.mark.parametrize(
    ("host", "settings", "allowed"),
    [
        ("localhost:8000", {}, True),
        ("LOCALHOST.", {}, True),
        ("127.0.0.1", {}, True),
        ("127.8.8.8:80", {}, True),
        ("[::1]:8000", {}, True),
        ("rebound.example:8000", {}, False),
        ("localhost.rebound.example", {}, False),
        ("192.0.2.7:8000", {}, False),
        ("", {}, False),
        ("[", {}, False),
        ("gpu.example", {"host": "gpu.example"}, True),
        ("gpu.example:1", {"allowed_hosts": ("GPU.example",)}, True),
        ("[2001:db8::1]:8000", {"allowed_hosts": ("2001:db8::1",)}, True),
        ("other.example", {"allowed_hosts": ("gpu.example",)}, False),
        ("other.example", {"allowed_hosts": ("*",)}, True),
        ("other.example", KEYS, True),
        ("other.example", KEYS | {"allowed_hosts": ("gpu.example",)}, False),
        ("gpu.example", KEYS | {"allowed_hosts": ("gpu.example",)}, True),
        ("localhost", KEYS | {"allowed_hosts": ("gpu.example",)}, True),
    ],
)
async def test_host_is_checked_without_keys_or_with_allowed_hosts(
    host: str, settings: dict[str, Any], allowed: bool
) -> None:
    async with client(config=Config(**settings)) as http:
        for path in ("/v1/models", "/health", "/nothing", "/docs"):
            response = await http.get(path, headers={"host": host, "authorization": "Bearer k"})
            if allowed:
                assert response.status_code in (200, 404)
            elif path == "/health" and host[:1].isdigit():
                assert response.status_code == 200, "health checks name an address"
            else:
                error = response.json()["error"]
                assert (response.status_code, error["code"]) == (403, "host_not_allowed")
                assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize(
    ("origin", "settings", "allowed"),
    [
        ("http://localhost:3000", {}, True),
        ("http://127.0.0.1:8000", {}, True),
        ("tauri://localhost", {}, True),
        ("https://evil.example", {}, False),
        ("https://localhost.evil.example", {}, False),
        ("null", {}, False),
        ("http://[", {}, False),
        ("", {}, False),
        ("https://page.example", {"cors_origins": ("https://page.example",)}, True),
        ("null", {"cors_origins": ("*",)}, True),
        ("https://gpu.example", {"allowed_hosts": ("gpu.example",)}, True),
        ("https://evil.example", {"allowed_hosts": ("*",)}, False),
        ("https://evil.example", KEYS, True),
        ("https://evil.example", KEYS | {"allowed_hosts": ("gpu.example",)}, False),
    ],
)
async def test_origin_is_checked_without_keys_or_with_allowed_hosts(
    origin: str, settings: dict[str, Any], allowed: bool
) -> None:
    async with client(config=Config(**settings)) as http:
        headers = {"origin": origin, "authorization": "Bearer k"}
        for response in (
            await http.get("/v1/models", headers=headers),
            await http.post("/v1/completions", json={"prompt": "x"}, headers=headers),
        ):
            if allowed:
                assert response.status_code == 200
            else:
                assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
                assert "--cors-origins" in response.json()["error"]["message"]


async def test_page_may_use_the_server_that_it_came_from() -> None:
    async with client(config=Config(allowed_hosts=("*",))) as http:
        headers = {"host": "ui.example", "origin": "https://ui.example"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("content_type", "status"), [(None, 415), ("", 415), ("text/plain", 415), ("application/json", 200)]
)
async def test_post_without_keys_needs_a_content_type(content_type: str | None, status: int) -> None:
    """A page may send a body without a type, or with that of a form, to any site without asking it first."""
    headers = {} if content_type is None else {"content-type": content_type}

    async def chunks() -> Any:
        yield b'{"prompt": "x"}'

    async with client() as http:
        for content in (b'{"prompt": "x"}', chunks()):
            response = await http.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == status
            assert status == 200 or "application/json" in response.json()["error"]["message"]


async def test_post_without_a_content_type_is_accepted_with_a_key() -> None:
    async with client(config=Config(**KEYS)) as http:
        headers = {"authorization": "Bearer k"}
        assert (await http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)).status_code == 200


async def test_post_without_a_body_needs_no_content_type() -> None:
    async with client() as http:
        assert (await http.post("/v1/responses/resp_1/cancel")).status_code == 404
