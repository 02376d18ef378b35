"""Real requests of several organizations, so that the pictures of the console show a server in use."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from syringa.store import Store

CHAT_MODEL, SUPPORT_MODEL, EMBEDDING_MODEL = "SmolLM2-135M-Instruct", "support-bot", "all-MiniLM-L6-v2"
SETTINGS = f"""
requests_per_minute = 0

[[models]]
id = "{CHAT_MODEL}"
path = "default"
max_model_len = 2048
prices = {{input = 0.15, cached_input = 0.03, output = 0.6}}

[[models]]
id = "{SUPPORT_MODEL}"
path = "default"
max_model_len = 2048
aliases = ["bot"]
defaults = {{temperature = 0.2}}
prices = {{input = 0.3, cached_input = 0.06, output = 1.2}}

[[models]]
id = "{EMBEDDING_MODEL}"
path = "embedding"
aliases = ["embedding"]
prices = {{input = 0.02}}
"""

# The bodies of POST /admin/keys. The first key has admin rights: once it exists, requests need a key.
KEYS: Sequence[dict[str, Any]] = (
    {"organization": "acme", "name": "ops", "admin": True},
    {"organization": "acme", "name": "website", "models": [SUPPORT_MODEL], "concurrent": 16},
    {"organization": "northwind", "name": "assistant", "requests_per_minute": 600},
    {"organization": "northwind", "name": "search", "models": [EMBEDDING_MODEL], "tokens_per_minute": 200_000},
    {"organization": "university", "name": "course", "requests_per_minute": 20},  # some of its requests get 429
)
LIMITS = {"acme": {"requests_per_minute": 3000}, "university": {"tokens_per_minute": 50_000, "concurrent": 4}}

LOAD = (1, 3, 5, 8, 6, 4, 7, 10, 8, 5, 3, 6)  # concurrent requests of each step of the load
STEP_SECONDS = 10.0
SYSTEM = "You are the assistant of a garden center. Answer in one or two sentences, and be friendly."
QUESTIONS = (
    "When do lilacs bloom?",
    "How often does lavender need water?",
    "Which herbs grow on a balcony?",
    "Why do the leaves of my tomato turn yellow?",
    "When should roses be pruned?",
    "Which flowers do bees like?",
    "Can an olive tree stay outside in winter?",
    "What is compost?",
)
DAY_SECONDS = 86400
HISTORY = (88, 72, 31, 24, 79, 93)  # percent of the requests of today on each of the days before
MAX_RECORDS = 100_000
FLUSH_SECONDS = 1.0  # how often a server writes its usage
ENDED = ("completed", "incomplete", "failed", "expired", "cancelled")


class Client(httpx.AsyncClient):
    """The HTTP client of one API key, or of none."""

    def __init__(self, url: str, key: str = "") -> None:
        super().__init__(base_url=url, headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=120)

    async def create(self, path: str, **body: Any) -> dict[str, Any]:
        return (await self.post(path, json=body)).raise_for_status().json()

    async def wait_for(self, path: str) -> None:
        """Wait until a background response or a batch has ended."""
        async with asyncio.timeout(120):
            while (await self.get(path)).raise_for_status().json()["status"] not in ENDED:  # noqa: ASYNC110
                await asyncio.sleep(0.2)


async def create_keys(url: str) -> dict[str, str]:
    """Create the keys and the limits of organizations on a server without any, and return the keys by name."""
    keys: dict[str, str] = {}
    for body in KEYS:
        async with Client(url, keys.get("ops", "")) as client:
            keys[body["name"]] = (await client.create("/admin/keys", **body))["key"]
    async with Client(url, keys["ops"]) as client:
        for organization, limits in LIMITS.items():
            (await client.put(f"/admin/organizations/{organization}", json=limits)).raise_for_status()
    return keys


async def create_responses(client: Client) -> None:
    """Create a conversation, a background response and two chains."""
    common = {"model": CHAT_MODEL, "temperature": 0, "max_output_tokens": 160}
    conversation = await client.create("/v1/conversations", metadata={"customer": "Ada", "topic": "Italy"})
    for text in ("What is the capital of Italy?", "What is it known for?"):
        await client.create("/v1/responses", **common, input=text, conversation=conversation["id"])
    summary = "Summarize why tests matter in software."
    running = await client.create("/v1/responses", **common, input=summary, background=True)
    await client.wait_for(f"/v1/responses/{running['id']}")
    for first, *others in (
        ("What is photosynthesis?", "Why is it important?"),
        ("Explain HTTP in one paragraph.", "What is HTTPS?", "Why does it matter?", "What is a status code?"),
    ):
        previous = await client.create("/v1/responses", **common, input=first)
        for text in others:
            previous = await client.create("/v1/responses", **common, input=text, previous_response_id=previous["id"])


async def create_batches(client: Client) -> None:
    """Run three batches, one of them with a request that fails."""
    drafts = [{"prompt": each, "max_tokens": 24} for each in (*QUESTIONS, "Dear customer,")]
    chats = [{"messages": [{"role": "user", "content": each}], "max_tokens": 48} for each in QUESTIONS]
    await _run_batch(client, "/v1/completions", CHAT_MODEL, [*drafts, {"prompt": "Lilac", "max_tokens": -1}])
    await _run_batch(client, "/v1/embeddings", EMBEDDING_MODEL, [{"input": each} for each in QUESTIONS])
    await _run_batch(client, "/v1/chat/completions", CHAT_MODEL, chats)


async def _run_batch(client: Client, endpoint: str, model: str, bodies: Sequence[dict[str, Any]]) -> None:
    requests = (
        {"custom_id": str(number), "method": "POST", "url": endpoint, "body": {"model": model, **body}}
        for number, body in enumerate(bodies, 1)
    )
    files = {"file": ("requests.jsonl", "\n".join(map(json.dumps, requests)))}
    uploaded = (await client.post("/v1/files", data={"purpose": "batch"}, files=files)).raise_for_status().json()
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch = await client.create("/v1/batches", **body)
    await client.wait_for(f"/v1/batches/{batch['id']}")


async def add_history(database: str) -> None:
    """Add the usage of the days before to a server's database: that of today again, on each day a part of it."""
    async with Store(database) as store:
        while True:
            known = len(await store.read(lambda session: session.usage.records(limit=MAX_RECORDS)))
            await asyncio.sleep(2 * FLUSH_SECONDS)  # until what has ended is written
            today = await store.read(lambda session: session.usage.records(limit=MAX_RECORDS))
            if len(today) == known:
                break
        for days, share in enumerate(HISTORY, 1):
            copies = [
                msgspec.structs.replace(each, id=f"{each.id}-{days}", at=each.at - days * DAY_SECONDS)
                for number, each in enumerate(today)
                if number * 37 % 100 < share
            ]
            await store.write(lambda session, copies=copies: session.usage.add(copies))


async def send_load(url: str, keys: dict[str, str], seconds: float) -> None:
    """Send requests with all keys for some time, more and fewer at a time."""
    turns = itertools.cycle(KEYS)
    questions = itertools.cycle(QUESTIONS)

    async def work(end: float) -> None:
        while time.monotonic() < end:
            body = next(turns)
            await _send(url, keys[body["name"]], body.get("models", [CHAT_MODEL])[0], next(questions))
            await asyncio.sleep(0.3)

    last = time.monotonic() + seconds
    for width in itertools.cycle(LOAD):
        end = min(time.monotonic() + STEP_SECONDS, last)
        await asyncio.gather(*(work(end) for _ in range(width)))
        if end == last:
            break


async def _send(url: str, key: str, model: str, question: str) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    async with Client(url, key) as client:
        if model == EMBEDDING_MODEL:
            response = await client.post("/v1/embeddings", json={"model": model, "input": QUESTIONS})
        else:
            body = {"model": model, "messages": messages, "max_tokens": 96, "user": "visitor"}
            response = await client.post("/v1/chat/completions", json=body)
    if response.status_code != 429:
        response.raise_for_status()
