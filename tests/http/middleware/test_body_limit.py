from __future__ import annotations

from syringa.config import Config
from tests.client import client


async def test_body_over_the_limit_is_rejected() -> None:
    async with client(config=Config(max_body_bytes=100)) as http:
        with_length = await http.post("/v1/completions", json={"prompt": "x" * 200})

        async def chunks():
            for _ in range(20):
                yield b" " * 10

        chunked = await http.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    for response in (with_length, chunked):
        assert response.status_code == 413
        assert "100 bytes" in response.json()["error"]["message"]
