"""Automatic retries of the `openai` package after a 429. It runs in the environment of that package.

python openai_retry_client.py URL KEY MODEL, with a key that allows one concurrent request.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import openai
from client_checks import expect_error, run_checks

URL, KEY, MODEL = sys.argv[1:]
WHOLE = {"ignore_eos": True}
LONG = {"model": MODEL, "prompt": "Once", "max_tokens": 3000, "stream": True, "extra_body": WHOLE}
statuses: list[int] = []
refused = threading.Event()


def note(response: Any) -> None:
    statuses.append(response.status_code)
    if response.status_code == 429:
        assert float(response.headers["retry-after"]) >= 1
        refused.set()


def client(max_retries: int) -> openai.OpenAI:
    watched = openai.DefaultHttpxClient(event_hooks={"response": [note]})
    return openai.OpenAI(base_url=URL + "/v1", api_key=KEY, timeout=120, max_retries=max_retries, http_client=watched)


def check_one_too_many_without_retries():
    with client(0).completions.create(**LONG) as stream:
        next(iter(stream))
        error = expect_error(openai.RateLimitError, client(0).completions.create, model=MODEL, prompt="x", max_tokens=1)
    assert error.code == "rate_limit_exceeded"
    assert error.status_code == 429


def check_a_call_that_is_one_too_many_is_made_again():
    """The first request ends when the second has been refused."""
    answers = []

    def second() -> None:
        answers.append(client(60).completions.create(model=MODEL, prompt="x", max_tokens=2, extra_body=WHOLE))

    caller = threading.Thread(target=second)
    with client(60).completions.create(**LONG) as stream:
        next(iter(stream))
        statuses.clear()
        refused.clear()
        caller.start()
        assert refused.wait(60)
    caller.join(120)
    assert answers[0].usage.completion_tokens == 2
    assert statuses[0] == 429
    assert statuses[-1] == 200
    assert set(statuses[:-1]) == {429}


run_checks(globals())
