"""Batches against `syringa serve`, on the real model: clients, and processes that are killed in the middle."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from syringa.service.responses import process_identity
from syringa.store import Store, UsageRecord
from tests.e2e.conftest import KEY, MODEL
from tests.e2e.scripts import run_node
from tests.e2e.sdk import OPENAI_JS, OPENAI_PYTHON, python_with
from tests.e2e.server import Server, alive, serve, wait_for
from tests.store.helpers import read

pytestmark = [pytest.mark.model, pytest.mark.slow]

API_SERVER = "syringa.http.server.process"


def test_openai_python_package_runs_batches(shared_server: Server) -> None:
    script = Path(__file__).with_name("openai_batches_client.py")
    command = [str(python_with(*OPENAI_PYTHON)), str(script), shared_server.url, KEY, MODEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert result.stdout.endswith("passed\n"), result.stdout + result.stderr


def test_openai_javascript_package_runs_batches(shared_server: Server) -> None:
    run_node(shared_server, "openai_batches_client.mjs", OPENAI_JS)


def peak_bytes(process: int) -> int:
    (line,) = [each for each in Path(f"/proc/{process}/status").read_text().splitlines() if each.startswith("VmHWM")]
    return int(line.split()[1]) << 10


def test_file_of_200_mb_is_never_in_memory(shared_server: Server, tmp_path: Path) -> None:
    size, limit = 200 << 20, 32 << 20
    local, digest = tmp_path / "large.jsonl", hashlib.sha256()
    with local.open("wb") as file:
        for number in range(size >> 20):
            block = b"%08d\n" % number + random.Random(number).randbytes((1 << 20) - 9)
            digest.update(block)
            file.write(block)
    (process,) = shared_server.children(API_SERVER)
    headers = {"authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=shared_server.url, headers=headers, timeout=300) as http:

        def upload(path: Path) -> str:
            with path.open("rb") as file:
                form: dict[str, Any] = {"files": {"file": ("large.jsonl", file)}, "data": {"purpose": "batch"}}
                uploaded = http.post("/v1/files", **form)
            assert uploaded.status_code == 200, uploaded.text
            assert uploaded.json()["bytes"] == path.stat().st_size
            id: str = uploaded.json()["id"]
            return id

        (tmp_path / "small.jsonl").write_bytes(b"x" * (4 << 20))
        http.delete(f"/v1/files/{upload(tmp_path / 'small.jsonl')}")  # what it loads for the first one
        before = peak_bytes(process)
        id = upload(local)
        received = hashlib.sha256()
        with http.stream("GET", f"/v1/files/{id}/content") as response:
            for data in response.iter_bytes():
                received.update(data)
        assert received.digest() == digest.digest()
        body = {"input_file_id": id, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=body).json()

        def is_failed() -> bool:
            return bool(http.get(f"/v1/batches/{batch['id']}").json()["status"] == "failed")

        wait_for(is_failed, 300)  # it is no JSON
        assert http.delete(f"/v1/files/{id}").status_code == 200
    assert peak_bytes(process) - before < limit


def lines(count: int) -> bytes:
    found = []
    for number in range(count):
        body = {"prompt": f"{number} and", "max_tokens": 24, "ignore_eos": True, "seed": number}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        found.append(json.dumps(line))
    return "\n".join(found).encode()


def create(server: Server, content: bytes, endpoint: str = "/v1/completions") -> str:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        uploaded = http.post("/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"}).json()
        body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
        id: str = http.post("/v1/batches", json=body).json()["id"]
        return id


def completed(server: Server, id: str, count: int) -> Callable[[], bool]:
    """Return a function that tells whether so many lines are done. A server that is starting does not answer."""

    def is_done() -> bool:
        try:
            found = httpx.get(f"{server.url}/v1/batches/{id}", timeout=10)
        except httpx.TransportError:
            return False
        return found.status_code == 200 and found.json()["request_counts"]["completed"] >= count

    return is_done


def finished(server: Server, id: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def is_finished() -> bool:
        nonlocal found
        try:
            answer = httpx.get(f"{server.url}/v1/batches/{id}", timeout=60)
        except httpx.TransportError:  # the process of the connection was killed
            return False
        if answer.status_code == 503:  # the next one is starting
            return False
        found = answer.raise_for_status().json()
        return found["status"] not in ("validating", "in_progress", "finalizing")

    wait_for(is_finished, 300)
    return found


def test_killed_processes_neither_lose_nor_repeat_a_line(tmp_path: Path) -> None:
    count, database = 200, str(tmp_path / "syringa.db")
    arguments = ("--database", database, "--batch-concurrency", "16")
    with serve(*arguments) as server:
        id = create(server, lines(count))
        for done in (20, 60):
            wait_for(completed(server, id, done), 300)
            (process,) = server.children(API_SERVER)
            os.kill(process, signal.SIGKILL)
            wait_for(lambda process=process: not alive(process))  # type: ignore[misc]
        wait_for(completed(server, id, 100), 300)
        server.process.kill()  # all others end with it
        server.process.wait()
    with serve(*arguments) as server:
        batch = finished(server, id)
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        output = [json.loads(line) for line in server.get(f"/v1/files/{batch['output_file_id']}/content").iter_lines()]
    assert [line["custom_id"] for line in output] == [str(number) for number in range(count)]
    assert all(line["response"]["body"]["usage"]["completion_tokens"] == 24 for line in output)
    records = asyncio.run(read_usage(database))
    assert sorted(record.id for record in records) == sorted(line["id"] for line in output)
    assert batch["usage"]["output_tokens"] == sum(record.output_tokens for record in records) == 24 * count


def test_batches_of_a_killed_api_process_go_on_in_another_one(tmp_path: Path) -> None:
    """Of two API processes, the one that runs the batch is killed again and again."""
    count, database = 200, str(tmp_path / "syringa.db")
    with serve("--database", database, "--batch-concurrency", "16", "--workers", "2") as server:
        id = create(server, lines(count))
        for done in (10, 40, 70):
            wait_for(completed(server, id, done), 300)
            owner = asyncio.run(read_owner(database))
            if owner is None:
                break  # it has just finished
            assert owner in server.children(API_SERVER)
            os.kill(owner, signal.SIGKILL)
            wait_for(lambda owner=owner: not alive(owner))  # type: ignore[misc]
        batch = finished(server, id)
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        output = [json.loads(line) for line in server.get(f"/v1/files/{batch['output_file_id']}/content").iter_lines()]
    assert [line["custom_id"] for line in output] == [str(number) for number in range(count)]
    records = asyncio.run(read_usage(database))
    assert sorted(record.id for record in records) == sorted(line["id"] for line in output)


def test_killed_processes_store_each_response_once(tmp_path: Path) -> None:
    count, database = 60, str(tmp_path / "syringa.db")
    found = []
    for number in range(count):
        body = {"input": f"{number} and", "max_output_tokens": 16, "ignore_eos": True}
        found.append(json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/responses", "body": body}))
    with serve("--database", database, "--batch-concurrency", "16") as server:
        id = create(server, "\n".join(found).encode(), "/v1/responses")
        for done in (5, 25):
            wait_for(completed(server, id, done), 300)
            (process,) = server.children(API_SERVER)
            os.kill(process, signal.SIGKILL)
            wait_for(lambda process=process: not alive(process))  # type: ignore[misc]
        batch = finished(server, id)
        assert batch["request_counts"] == {"total": count, "completed": count, "failed": 0}
        output = [json.loads(line) for line in server.get(f"/v1/files/{batch['output_file_id']}/content").iter_lines()]
        stored = server.get("/v1/responses?limit=100").json()["data"]
    assert sorted(each["id"] for each in stored) == sorted(line["response"]["body"]["id"] for line in output)


async def read_owner(database: str) -> int | None:
    """Return the id of the process that runs the batch, once one does; None: it is finished."""
    async with asyncio.timeout(120), Store(database) as store:
        while active := await read(store).batches.active():
            owner = active[0].owner
            if owner is not None and not process_identity.has_exited(owner):
                return int(owner.split("/")[1])
            await asyncio.sleep(0.05)
    return None


async def read_usage(database: str) -> list[UsageRecord]:
    async with Store(database) as store:
        found: list[UsageRecord] = await read(store).usage.records(limit=100_000)
        return found
