"""Chat templates of requests on a real server: they change the prompt, and hostile ones harm nobody."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.server import serve

pytestmark = [pytest.mark.model, pytest.mark.slow]

HI = [{"role": "user", "content": "Say something."}]
CHAT = "/v1/chat/completions"
OWN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | upper }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant{{ '\n' }}"
)
LOOP = "{% for i in range(99999) %}"
HOSTILE = [
    LOOP * 3 + "{% endfor %}" * 3,
    "{{ 'x' * 10**10 }}",
    "{% set s = namespace(x='x') %}{% for i in range(99) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
    "{{ " + "(" * 9000 + ")" * 9000 + " }}",
    "{% for i in range(10**9) %}{% endfor %}",
]


def test_server_without_keys_takes_templates_and_survives_hostile_ones() -> None:
    with serve("--requests-per-minute", "0") as server:
        asyncio.run(_check(server.url))


async def _check(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        body: dict[str, Any] = {"messages": HI, "max_tokens": 8, "chat_template": OWN, "return_prompt_text": True}
        answer = (await http.post(CHAT, json=body)).json()
        assert answer["prompt_text"] == "<|im_start|>user\nSAY SOMETHING.<|im_end|>\n<|im_start|>assistant\n"
        attacks = [
            asyncio.create_task(http.post(CHAT, json={"messages": HI, "chat_template": source}))
            for source in HOSTILE * 3
        ]
        others = [
            asyncio.create_task(http.post(CHAT, json={"messages": HI, "max_tokens": 8, "seed": seed}))
            for seed in range(10)
        ]
        assert {each.status_code for each in await asyncio.gather(*others)} == {200}
        for each in await asyncio.gather(*attacks):
            assert each.status_code == 400, each.text
            assert each.json()["error"]["param"] == "chat_template"
        assert (await http.post(CHAT, json=body)).status_code == 200
