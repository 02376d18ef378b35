"""Scoring a text with `echo` and `logprobs` gives the same log-probabilities as `transformers`.

`python -m bench.lm_eval_check` does the same through lm_eval, which takes minutes to install.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from syringa.modelfiles import load_tokenizer, locate
from tests.e2e.server import serve
from tests.reference import reference_model, token_logprobs

pytestmark = pytest.mark.model

DATA = Path(__file__).parents[1] / "data"
TEXTS = [path.read_text()[:600] for path in sorted((DATA / "texts").glob("*.txt"))]
QUESTIONS = [json.loads(line) for line in (DATA / "questions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with serve("--dtype", "fp32") as server, httpx.Client(base_url=server.url, timeout=300) as http:
        yield http


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the server needs the other core
    yield reference_model()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(locate("default"))


def score(http: httpx.Client, prompts: list[Any]) -> list[list[float]]:
    """Return the log-probabilities of the tokens of each prompt, except the first token."""
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = [choice["logprobs"]["token_logprobs"] for choice in answer.json()["choices"]]
    assert all(each[0] is None for each in found)
    return [each[1:] for each in found]


def test_echoed_logprobs_equal_transformers(http: httpx.Client, reference: Any, tokenizer: Any) -> None:
    expectations = token_logprobs(reference, [tokenizer.encode(text).ids for text in TEXTS])
    for text, scored, expected in zip(TEXTS, score(http, TEXTS), expectations, strict=True):
        assert len(scored) == len(expected) > 100
        assert math.isclose(sum(scored), sum(expected), rel_tol=1e-5), text[:40]
        assert max(abs(a - b) for a, b in zip(scored, expected, strict=True)) < 1e-3


def one_more(http: httpx.Client, text: str) -> dict[str, Any]:
    """Send the request of lm_eval, which drops the last, generated token."""
    body = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    choice: dict[str, Any] = http.post("/v1/completions", json=body).json()["choices"][0]
    return choice


def test_generating_a_token_changes_no_prompt_logprob(http: httpx.Client) -> None:
    (scored,) = score(http, [TEXTS[0]])
    choice = one_more(http, TEXTS[0])
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"][1:-1] == scored


def test_end_token_after_an_echoed_prompt(http: httpx.Client) -> None:
    text = "Question: Which season comes after winter?\nAnswer: spring"
    (scored,) = score(http, [text])
    choice = one_more(http, text)
    assert choice["finish_reason"] == "stop"
    assert choice["logprobs"]["token_logprobs"][1:-1] == scored


@pytest.mark.slow
def test_multiple_choice_answers_equal_transformers(http: httpx.Client, reference: Any, tokenizer: Any) -> None:
    right = {"syringa": 0, "transformers": 0}
    for first in range(0, len(QUESTIONS), 6):  # per request
        questions = QUESTIONS[first : first + 6]
        contexts = [f"Question: {question['question']}\nAnswer:" for question in questions]
        prompts = [
            tokenizer.encode(f"{context} {choice}").ids
            for context, question in zip(contexts, questions, strict=True)
            for choice in question["choices"]
        ]
        scored = {"syringa": iter(score(http, prompts)), "transformers": iter(token_logprobs(reference, prompts))}
        for context, question in zip(contexts, questions, strict=True):
            start = len(tokenizer.encode(context).ids) - 1
            sums = {name: [sum(next(rows)[start:]) for _ in question["choices"]] for name, rows in scored.items()}
            assert sums["syringa"] == pytest.approx(sums["transformers"], abs=2e-3)
            for name, values in sums.items():
                right[name] += values.index(max(values)) == question["answer"]
    print(f"{right} of {len(QUESTIONS)} right")
    assert right["syringa"] == right["transformers"] > 10


def test_prompt_logprobs_equal_transformers(http: httpx.Client, reference: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode(TEXTS[0]).ids
    completion = http.post("/v1/completions", json={"prompt": TEXTS[0], "prompt_logprobs": 1, "max_tokens": 0}).json()
    body = {"messages": [{"role": "user", "content": TEXTS[0]}], "prompt_logprobs": 0, "max_tokens": 1}
    chat = http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
    cases = [(ids, completion["choices"][0]), (chat["prompt_token_ids"], chat)]
    for (tokens, place), expected in zip(cases, token_logprobs(reference, [ids, cases[1][0]]), strict=True):
        first, *scores = place["prompt_logprobs"]
        assert first is None
        found = [each[str(token)]["logprob"] for token, each in zip(tokens[1:], scores, strict=True)]
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 1e-3
    for each in completion["choices"][0]["prompt_logprobs"][1:]:
        best = next(score for score in each.values() if score["rank"] == 1)
        assert all(score["logprob"] <= best["logprob"] for score in each.values())


def test_beams_are_likelier_than_the_greedy_completion(http: httpx.Client) -> None:
    body = {"prompt": "The best way to learn a language is", "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    beams = body | {"use_beam_search": True, "n": 4, "return_token_ids": True}
    answers = [http.post("/v1/completions", json=beams).json()["choices"] for _ in range(2)]
    assert answers[0] == answers[1]
    totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in answers[0]]
    assert totals == sorted(totals, reverse=True)
    assert len({tuple(choice["token_ids"]) for choice in answers[0]}) == 4
    greedy = http.post("/v1/completions", json=body | {"temperature": 0}).json()["choices"][0]
    assert totals[0] >= sum(greedy["logprobs"]["token_logprobs"])
    (scored,) = score(http, [body["prompt"] + answers[0][0]["text"]])
    assert sum(scored[-6:]) == pytest.approx(totals[0], abs=1e-3)
