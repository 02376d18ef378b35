"""Shutdown of a real server: signals, running streams and the log."""

from __future__ import annotations

import json
import signal
import threading
import time
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, alive, serve, wait_for

pytestmark = [pytest.mark.model, pytest.mark.slow]

PROMPT = "Once upon a time there was a purple giraffe"
BODY = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}


class Reader(threading.Thread):
    """A thread that reads a stream of several minutes."""

    def __init__(self, server: Server) -> None:
        super().__init__(daemon=True)
        self.url = server.url + "/v1/completions"
        self.lines: list[str] = []
        self.begun = threading.Event()
        self.start()
        assert self.begun.wait(120)

    def run(self) -> None:
        with httpx.stream("POST", self.url, json=BODY, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    self.lines.append(line)
                    self.begun.set()

    def last(self) -> Any:
        """Return the last event, after the end of the stream."""
        self.join(120)
        assert not self.is_alive()
        return json.loads(self.lines[-1][5:])


def warm(server: Server) -> None:
    wait_for(lambda: server.complete(prompt="x", max_tokens=1).status_code == 200)


def test_drain_timeout_ends_a_stream_with_an_error_event_and_logs_json() -> None:
    with serve("--drain-timeout", "20", "--log-format", "json", "--log-level", "debug") as server:
        warm(server)
        children = server.children()
        reader = Reader(server)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ready() == 503)
        refused = server.complete(prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_ending")
        assert reader.last()["error"]["code"] == "server_ending"
        assert server.process.wait(120) == 0
        assert not any(alive(child) for child in children)
        output = server.log.read_text()
    assert PROMPT not in output
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    access = [line for line in lines if line["logger"] == "syringa.access" and line.get("outcome") == "failed"]
    assert [line["status"] for line in access] == [200]  # the response had begun
    assert access[0]["output_tokens"] > 0
    assert access[0]["request_id"]
    assert any("shutdown: draining" in line["message"] for line in lines)


def test_second_signal_ends_the_drain_at_once() -> None:
    with serve("--drain-timeout", "300", "--workers", "2") as server:
        warm(server)
        children = server.children()
        reader = Reader(server)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.ready() == 503)
        wait_for(lambda: server.log.read_text().count("shutdown: draining") == 2)  # both have handled the first signal
        time.sleep(2)  # an API process ignores a second signal that comes too soon as a duplicate of the first
        assert reader.is_alive()
        server.process.send_signal(signal.SIGINT)
        assert reader.last()["error"]["code"] == "server_ending"
        assert server.process.wait(120) == 0
        assert not any(alive(child) for child in children)
