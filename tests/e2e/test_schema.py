"""Bodies and chunks of the real model match OpenAI's schemas, and the chunks of a stream add up to the body."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.client import events
from tests.e2e.server import Server, serve
from tests.schemas import reassemble, validate_openai

pytestmark = pytest.mark.model

REQUESTS: dict[str, dict[str, Any]] = {
    "nothing but a prompt": {"prompt": "Hello, "},
    "no prompt": {"max_tokens": 4},
    "strings": {"prompt": ["The sky is", "", "Once"], "max_tokens": 6},
    "token ids": {"prompt": [504, 3575, 282], "max_tokens": 6},
    "arrays of token ids": {"prompt": [[504, 3575], [282]], "max_tokens": 6},
    "choices": {"prompt": "Once upon a time", "n": 3, "temperature": 1.3, "top_p": 0.9},
    "log-probabilities": {"prompt": "Once", "logprobs": 5, "n": 2},
    "log-probabilities of the sampled tokens only": {"prompt": "Once", "logprobs": 0},
    "echo": {"prompt": "Once upon", "echo": True, "logprobs": 2},
    "echo of token ids": {"prompt": [[504, 3575], [282, 314]], "echo": True, "logprobs": 1, "n": 2},
    "scoring": {"prompt": ["A text to score: 日本 😀", "Another"], "echo": True, "logprobs": 1, "max_tokens": 0},
    "half characters": {"prompt": "日本の首都は東京です。😀😂", "temperature": 1.5, "logprobs": 3, "max_tokens": 40},
    "a stop string": {"prompt": "1, 2, 3, 4,", "temperature": 0, "stop": [" 7", "\n\n"], "max_tokens": 40},
    "a stop string with log-probabilities": {"prompt": "1, 2,", "temperature": 0, "stop": "5", "logprobs": 1},
    "suffix": {"prompt": "def f():", "suffix": "\n    return x"},
    "best_of": {"prompt": "Once", "best_of": 3, "n": 2, "logprobs": 1},
    "json": {"prompt": "A person: ", "response_format": {"type": "json_object"}, "max_tokens": 30},
    "regex": {"prompt": "Call me: ", "grammar": {"type": "regex", "value": r"\d{3}-\d{4}"}, "logprobs": 1},
    "lark": {"prompt": "Yes or no? ", "grammar": {"type": "lark", "value": 'start: "yes" | "no"'}},
    "penalties": {
        "prompt": "la la la la",
        "frequency_penalty": 1,
        "presence_penalty": -1,
        "repetition_penalty": 1.2,
        "dry_multiplier": 0.8,
        "logit_bias": {"100": 5},
    },
    "extension fields": {"prompt": "Once", "min_tokens": 8, "ignore_eos": True, "stop_token_ids": [28], "top_k": 40},
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve() as server, client(server) as http:
        yield http


def client(server: Server) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=300)


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    answer = http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-syringa-ignored" not in answer.headers
    return answer


@pytest.mark.parametrize("path", ["/v1/completions", "/api/v2/completions"])
@pytest.mark.parametrize("name", REQUESTS)
def test_bodies_and_chunks_match_openai_schemas(http: httpx.Client, path: str, name: str) -> None:
    body = {"model": "default", "seed": 7, **REQUESTS[name]}
    whole = post(http, path, body).json()
    validate_openai(whole)
    prompts = body["prompt"] if isinstance(body.get("prompt"), list) and not isinstance(body["prompt"][0], int) else [0]
    assert len(whole["choices"]) == body.get("n", 1) * len(prompts)
    assert all(choice["finish_reason"] for choice in whole["choices"])
    if "best_of" in body:
        return  # cannot be streamed
    streamed = reassemble(
        events(post(http, path, body | {"stream": True, "stream_options": {"include_usage": True}}).text)
    )
    for each in (whole, streamed):
        del each["id"], each["created"], each["usage"]["prompt_tokens_details"]  # the second is cached
    assert streamed == whole


def test_model_list_matches_openai_schema(http: httpx.Client) -> None:
    for path in ("/v1/models", "/api/v2/models"):
        listed = http.get(path).json()
        validate_openai(listed, "ListModelsResponse")
    (model,) = listed["data"]
    validate_openai(http.get(f"/v1/models/{model['id']}").json(), "Model")


def test_error_matches_openai_schema(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"temperature": 3})
    assert answer.status_code == 400
    validate_openai(answer.json()["error"], "Error")
