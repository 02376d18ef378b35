"""The processes of a server: restarts after a crash, and the end of all processes."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections.abc import Iterator

import httpx
import pytest

from tests.e2e.server import Server, alive, serve, wait_for

pytestmark = pytest.mark.model

WORKER, API = "syringa.engine.worker.server", "syringa.http.server.process"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serve("--workers", "2") as server:
        yield server


def test_completion_equals_its_stream(server: Server) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0.8, "seed": 5}
    whole = server.complete(**body).json()["choices"][0]["text"]
    pieces = []
    with httpx.stream("POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=120) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["text"])
    assert "".join(pieces) == whole
    assert whole


def test_two_api_processes_share_one_worker(server: Server) -> None:
    assert len(server.children(API)) == 2
    assert len(server.children(WORKER)) == 1


def test_streams_of_killed_worker_go_on_in_the_restarted_one(server: Server) -> None:
    (worker,) = server.children(WORKER)
    body = {"prompt": "Once", "max_tokens": 150, "ignore_eos": True, "seed": 3, "stream": True}
    texts: list[str] = []
    begun = threading.Semaphore(0)

    def read_stream() -> None:
        pieces: list[str] = []
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if not pieces:
                        begun.release()
                    pieces.append(json.loads(line[6:])["choices"][0]["text"])
        texts.append("".join(pieces))

    readers = [threading.Thread(target=read_stream) for _ in range(4)]
    for reader in readers:
        reader.start()
    for _ in readers:
        assert begun.acquire(timeout=120)
    os.kill(worker, signal.SIGKILL)
    for reader in readers:
        reader.join(120)
    undisturbed = server.complete(**body | {"stream": False}).json()["choices"][0]["text"]
    assert texts == [undisturbed] * 4
    assert server.children(WORKER) != [worker]


@pytest.mark.slow
def test_stopped_worker_is_reported_and_replaced() -> None:
    with serve("--workers", "2", "--heartbeat-timeout", "4", "--served-model-name", "m") as server:
        (worker,) = server.children(WORKER)
        answers: list[httpx.Response] = []
        body = {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        expected = server.complete(**body).json()["choices"]
        os.kill(worker, signal.SIGSTOP)
        waiting = [threading.Thread(target=lambda: answers.append(server.complete(**body))) for _ in range(4)]
        for each in waiting:
            each.start()
        httpx.get(server.url + "/metrics", timeout=60).raise_for_status()  # does not wait for the worker
        # Each of the two API processes is told by itself, and loading takes longer than to ask them.
        wait_for(lambda: server.ready() == 503)
        wait_for(lambda: 'syringa_model_ready{model_name="m"} 0.0' in server.get("/metrics").text)
        wait_for(lambda: not server.get("/status").json()["models"][0]["ready"])
        for each in waiting:
            each.join(120)
        assert [answer.json()["choices"] for answer in answers] == [expected] * 4
        server.wait_ready()
        for name in ("syringa_worker_hangs_total", "syringa_worker_crashes_total"):
            pattern = re.compile(rf'^{name}{{model_name="m"}} [1-9]', re.MULTILINE)
            wait_for(lambda pattern=pattern: pattern.search(server.get("/metrics").text))  # type: ignore[misc]
        assert not alive(worker)
        assert "model worker hangs" in server.log.read_text()


def test_killed_api_process_is_restarted(server: Server) -> None:
    for process in server.children(API):
        os.kill(process, signal.SIGKILL)
    server.wait_ready()
    assert server.complete(prompt="x", max_tokens=1).status_code == 200


def test_sigterm_finishes_streams_and_leaves_no_process() -> None:
    with serve("--drain-timeout", "100") as server:
        children = server.children()
        lines: list[str] = []
        begun = threading.Event()

        def read_stream() -> None:
            body = {"prompt": "Once", "max_tokens": 200, "ignore_eos": True, "stream": True}
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as answer:
                for line in answer.iter_lines():
                    lines.append(line)
                    begun.set()

        reader = threading.Thread(target=read_stream)
        reader.start()
        assert begun.wait(120)
        server.process.send_signal(signal.SIGTERM)
        reader.join(120)
        assert "data: [DONE]" in lines
        assert server.process.wait(120) == 0
        assert not any(alive(child) for child in children)


@pytest.mark.slow
def test_processes_exit_when_the_supervisor_is_killed() -> None:
    with serve() as server:
        children = server.children()
        assert len(children) == 2
        server.process.kill()
        server.process.wait()
        wait_for(lambda: not any(alive(child) for child in children))
