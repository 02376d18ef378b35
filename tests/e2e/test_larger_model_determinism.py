"""Seeded answers of a model with 4-bit weights: equal to the last bit alone and among 32 others, over HTTP."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server import Server, serve
from tests.larger_model import coder_model, needs_larger_model

pytestmark = needs_larger_model

TEXTS = sorted((Path(__file__).parents[1] / "data" / "texts").glob("*.txt"))
TARGETS, OTHERS = 100, 32


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    settings = ("--max-model-len", "1024", "--kv-cache-tokens", "32768", "--requests-per-minute", "0")
    with serve("--model", str(coder_model()), "--dtype", "gguf", *settings, ready=False) as running:
        running.wait_ready(1200)
        yield running


def target(number: int) -> dict[str, Any]:
    """Return a request: prompts, lengths and seeds differ, every fifth has two choices, every third logprobs."""
    words = TEXTS[number % len(TEXTS)].read_text(encoding="utf-8").split()
    body = {
        "prompt": " ".join(words[5 * number : 5 * number + 8 + number]),
        "max_tokens": 12 + number % 9,
        "temperature": 1.0,
        "seed": 1000 + number,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return body | ({"n": 2} if number % 5 == 0 else {}) | ({"logprobs": 3} if number % 3 == 0 else {})


def complete(server: Server, body: dict[str, Any], cache_salt: str) -> Any:
    """Return all that must be equal. With another salt, nothing is taken from the prefix cache."""
    answer = httpx.post(server.url + "/v1/completions", json=body | {"cache_salt": cache_salt}, timeout=1200)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert all(len(choice["token_ids"]) == body["max_tokens"] for choice in choices)
    return [(choice["token_ids"], choice["text"], choice.get("logprobs")) for choice in choices]


def complete_in_crowd(server: Server, bodies: list[dict[str, Any]]) -> tuple[list[Any], float]:
    """Return the answers to all bodies, of which `OTHERS` + 1 run at any time, and the most running sequences seen.

    After the last body was sent, further requests keep the batch as large until it is answered.
    """
    answers: list[Any] = [None] * len(bodies)
    pending = iter(enumerate(bodies))
    salts = itertools.count()
    answered = threading.Semaphore(0)
    done = threading.Event()
    lock = threading.Lock()

    def stream() -> None:
        while not done.is_set():
            with lock:
                number, body = next(pending, (-1, target(7)))
                salt = f"crowd {next(salts)}"
            answer = complete(server, body, salt)
            if number >= 0:
                answers[number] = answer
                answered.release()

    most = 0.0
    with ThreadPoolExecutor(OTHERS + 1) as pool:
        streams = [pool.submit(stream) for _ in range(OTHERS + 1)]
        try:
            for _ in bodies:
                while not answered.acquire(timeout=1):
                    failed = [each for each in wait(streams, timeout=0).done if each.exception()]
                    assert not failed, failed[0].exception()
                most = max(most, running(server))
        finally:
            done.set()
    return answers, most


def running(server: Server) -> float:
    """Return the number of running sequences."""
    text = httpx.get(server.url + "/metrics", timeout=60).text
    return sum(float(value) for value in re.findall(r"^syringa_num_requests_running(?:\{[^}]*\})? (\S+)$", text, re.M))


def test_seeded_answers_are_bit_equal_alone_and_among_32_others(server: Server) -> None:
    bodies = [target(number) for number in range(TARGETS)]
    alone = [complete(server, body, "alone") for body in bodies]
    assert len({str(answer) for answer in alone}) == TARGETS
    crowd, most = complete_in_crowd(server, bodies)
    equal = sum(first == second for first, second in zip(alone, crowd, strict=True))
    print(f"{equal} of {TARGETS} equal; up to {most:.0f} sequences ran at once")
    assert equal == TARGETS
    assert most > OTHERS
