from __future__ import annotations

from syringa.config import Config
from tests.client import client


async def test_cors_headers_follow_the_configuration() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "POST"}
    async with client(config=Config(cors_origins=("https://a.example",), api_key=("k",))) as http:
        preflight = await http.options("/v1/completions", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = await http.get("/v1/models", headers={"origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = await http.get("/health", headers={"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_cors_allows_the_methods_of_all_endpoints() -> None:
    headers = {"origin": "https://a.example", "access-control-request-method": "PUT"}
    async with client(config=Config(cors_origins=("https://a.example",), api_key=("k",))) as http:
        preflight = await http.options("/admin/models/m", headers=headers)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-methods"] == "DELETE, GET, HEAD, POST, PUT"
