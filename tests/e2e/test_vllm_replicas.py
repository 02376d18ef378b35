"""Two replicas of a model on the real vLLM, of which one is killed and one drained while requests run.

    VLLM_PYTHON=.venvs/vllm/bin/python pytest -n0 tests/e2e/test_vllm_replicas.py

See test_vllm.py for the environment and the model.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from syringa.engine.vllm.launch import MODULE
from tests.e2e.replica_server import GUARD_SECONDS, moves, ready_replicas
from tests.e2e.server import Server, alive, serve, wait_for
from tests.e2e.test_replicas import start_time
from tests.e2e.test_vllm import LOAD_SECONDS, PYTHON, children, folder, running  # noqa: F401  a fixture among them

pytestmark = [pytest.mark.model, pytest.mark.skipif(not PYTHON, reason="VLLM_PYTHON is not set")]

# A worker that the test stops, so that the other one gets all requests, must not be killed for it.
SETTINGS = """
heartbeat_timeout = 600
load_timeout = 0
[[models]]
id = "on-vllm"
path = "{path}"
engine = "vllm"
python = "{python}"
engine_args = {{enforce_eager = true}}
dtype = "fp32"
kv_cache_gb = 1
max_model_len = 1024
threads = 1
replicas = 2
"""
TOKENS = 240  # more than are computed until the requests of a stopped replica have moved
TEXT = {"prompt": "The history of bridges begins with", "max_tokens": TOKENS, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "Write about clocks."}], "max_tokens": TOKENS, "ignore_eos": True}
GREEDY = {**TEXT, "temperature": 0}

GOES_ON = [
    ("/v1/completions", {**GREEDY, "stream": True}),
    ("/v1/completions", GREEDY),
    ("/v1/chat/completions", {**CHAT, "stream": True}),
]
ENDS = [
    ("/v1/completions", {**TEXT, "seed": 1, "stream": True}, "`seed`"),
    ("/v1/completions", {**GREEDY, "frequency_penalty": 0.5}, "`frequency_penalty`"),
    (
        "/v1/chat/completions",
        {**CHAT, "structured_outputs": {"regex": "[a-z ]{900}"}, "stream": True},
        "a grammar, schema or tools",
    ),
]
BEGUN = 3  # parts of each stream after which all requests have begun: they are computed together


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:  # noqa: F811
    file = tmp_path_factory.mktemp("settings") / "syringa.toml"
    file.write_text(SETTINGS.format(path=folder, python=os.path.abspath(PYTHON)))
    with serve("--config", str(file), ready=False) as running_server:
        yield running_server


async def until(condition: Any, seconds: float = GUARD_SECONDS) -> Any:
    async with asyncio.timeout(seconds):
        while not (found := condition()):  # noqa: ASYNC110  processes can only be polled
            await asyncio.sleep(0.1)
    return found


async def all_ready(server: Server) -> list[int]:
    await until(lambda: len(ready_replicas(server)) == 2 and len(server.children(MODULE)) == 2, LOAD_SECONDS)
    return server.children(MODULE)


async def answer(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], on_part: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Run a request, and return its status, and either its text, finish reason and usage, or its error.

    `on_part` is called with each part of a stream that has text.
    """
    if not body.get("stream"):
        response = await http.post(path, json=body)
        found = response.json()
        if response.status_code != 200:
            return {"status": response.status_code, **found["error"], "headers": response.headers}
        choice = found["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        return {"status": 200, "text": text, "finish": choice["finish_reason"], "usage": found["usage"]}
    body = {**body, "stream_options": {"include_usage": True}}
    result: dict[str, Any] = {"text": "", "finish": None}
    async with http.stream("POST", path, json=body) as response:
        result["status"] = response.status_code
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                return {**result, **event["error"]}
            result["usage"] = event.get("usage") or result.get("usage")
            for choice in event["choices"]:
                text = choice.get("text") or choice.get("delta", {}).get("content") or ""
                result["text"] += text
                result["finish"] = choice["finish_reason"] or result["finish"]
                if text:
                    on_part()
    return result


async def run_all(server: Server, disturb: Any, more_tokens: int = 0) -> list[dict[str, Any]]:
    """Run all requests at one replica, and `disturb` with the ids of it and of the other one once all of them run.

    The other one is stopped until then: what it has got moves away before it has a token. `more_tokens`: added to the
    requests that end, which are others then: the same ones, after a crash, would wait until they are computed alone.
    """
    busy, idle = await all_ready(server)
    requests = [*GOES_ON, *((path, {**body, "max_tokens": TOKENS + more_tokens}) for path, body, _ in ENDS)]
    parts: Counter[int] = Counter()
    async with httpx.AsyncClient(base_url=server.url, timeout=GUARD_SECONDS) as http:
        os.kill(idle, signal.SIGSTOP)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(answer(http, *each, functools.partial(parts.update, [number])))
                    for number, each in enumerate(requests)
                ]
                await until(lambda: running(server) == len(requests))
                parts.clear()
                streams = [number for number, (_, body) in enumerate(requests) if body.get("stream")]
                await until(lambda: all(parts[number] >= BEGUN for number in streams))
                os.kill(idle, signal.SIGCONT)
                await disturb(http, busy)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(idle, signal.SIGCONT)
    return [task.result() for task in tasks]


def check(found: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Check that requests without such fields are complete, and that the others name the fields."""
    greedy_stream, greedy, chat, *ended = found
    for each in (greedy_stream, greedy):
        assert (each["status"], each["text"], each["finish"]) == (200, expected["text"], "length")
        assert each["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        assert each["usage"]["completion_tokens"] == TOKENS
    assert (chat["status"], chat["finish"], chat["usage"]["completion_tokens"]) == (200, "length", TOKENS)
    assert chat["text"]
    for each, (_, body, name) in zip(ended, ENDS, strict=True):
        assert each["code"] == "engine_unavailable", each
        assert f"cannot continue a request with {name} elsewhere: send it again" in each["message"]
        assert each["status"] == (200 if body.get("stream") else 503)
        if not body.get("stream"):
            assert int(each["headers"]["retry-after"]) > 0


def descendants(pid: int) -> list[int]:
    found = children(pid)
    return [*found, *(each for child in found for each in descendants(child))]


def test_requests_survive_a_killed_and_a_drained_replica_or_end_with_a_clear_error(server: Server) -> None:
    async def run() -> None:
        await all_ready(server)
        async with httpx.AsyncClient(base_url=server.url, timeout=LOAD_SECONDS) as http:
            expected = await answer(http, "/v1/completions", GREEDY)
        assert expected["usage"]["completion_tokens"] == TOKENS
        processes: list[int] = []

        async def kill(http: httpx.AsyncClient, pid: int) -> None:
            processes.extend(descendants(pid))
            os.kill(pid, signal.SIGKILL)

        check(await run_all(server, kill), expected)
        assert moves(server)["crash"] == len(GOES_ON)
        assert len(processes) >= 2  # the engine and the guard
        await until(lambda: not any(map(alive, processes)))

        async def drain(http: httpx.AsyncClient, pid: int) -> None:
            response = await http.post(f"/admin/replicas/{replica_of(server, pid)}/drain", json={"grace": 1})
            assert response.status_code == 200, response.text

        check(await run_all(server, drain, more_tokens=1), expected)
        assert moves(server)["drain"] == len(GOES_ON)
        await until(lambda: running(server) == 0)

    asyncio.run(run())


def replica_of(server: Server, pid: int) -> str:
    """Return the id of the replica that a worker runs: ids are numbered in the order in which workers are started."""
    ids = sorted(ready_replicas(server), key=lambda id: int(id.rpartition("-")[2]))
    return ids[sorted(server.children(MODULE), key=start_time).index(pid)]


def test_end_of_the_server_ends_all_processes_of_vllm(server: Server) -> None:
    """The last test: one replica is perhaps still loading, and is not waited for."""
    processes = [each for pid in server.children(MODULE) for each in (pid, *descendants(pid))]
    assert processes
    assert server.stop() == 0
    wait_for(lambda: not any(map(alive, processes)))
