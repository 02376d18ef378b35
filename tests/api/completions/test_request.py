"""Tests of `/v1/completions`: request fields, output and streams."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syringa.api.completions import request
from syringa.types import Grammar
from tests.client import client, events
from tests.fake_engine import START, FakeEngine, fake_model
from tests.schemas import reassemble, validate_openai
from tests.tiers import examples


async def post(body: dict[str, Any], engine: FakeEngine | None = None, **kwargs: Any) -> dict[str, Any]:
    async with client(engine or FakeEngine("hello"), **kwargs) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        return reassemble(events(answer.text))
    return answer.json()


async def test_completion_body() -> None:
    body = await post({"model": "alias", "prompt": "hi"})
    validate_openai(body)
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 1.7e9
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "system_fingerprint": "fp_unknown",
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 6,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ("hi", [[104, 105]]),
        (["hi", "o"], [[104, 105], [111]]),
        ([104, 105.0], [[104, 105]]),
        ([[104], [105, 106]], [[104], [105, 106]]),
        (None, [[START]]),
        ("", [[START]]),
        (["", "a"], [[START], [97]]),
    ],
)
async def test_completion_prompt_forms(prompt: Any, tokens: list[list[int]]) -> None:
    engine = FakeEngine("x")
    body = await post({"prompt": prompt, "n": 2}, engine)
    assert sorted(request.prompt for request in engine.requests) == sorted(tokens)
    assert [choice["index"] for choice in body["choices"]] == list(range(2 * len(tokens)))


@pytest.mark.parametrize("given", [[5] * 100_000, [[5] * 100] * 1000], ids=["one", "many"])
async def test_completion_checks_many_token_ids_in_a_thread(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[threading.Thread] = set()
    monkeypatch.setattr(request, "check_tokens", lambda *arguments: threads.add(threading.current_thread()))
    assert [len(prompt.tokens) for prompt in await request.read_prompts(given, fake_model())]
    assert threads
    assert threading.current_thread() not in threads


async def test_completion_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine("x")
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": -2, "frequency_penalty": 1,
        "presence_penalty": -1, "repetition_penalty": 1.5, "logit_bias": {"5": -100, "6": 1.5}, "dry_multiplier": 0.8,
        "dry_base": 2, "dry_allowed_length": 3, "dry_sequence_breakers": ["a", "b"], "max_tokens": 9, "min_tokens": 2,
        "grammar": {"type": "regex", "value": "[a-z]+"}, "ignore_eos": True, "stop_token_ids": [1, 2], "user": "u",
    }  # fmt: skip
    await post(body, engine)
    sampling, stopping = engine.requests[0].sampling, engine.requests[0].stopping
    for name in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"):
        assert getattr(sampling, name) == body[name]
    assert (sampling.repetition_penalty, sampling.seed, sampling.seeded) == (1.5, 2**63 - 2, True)
    assert sampling.logit_bias == {5: -100, 6: 1.5}
    assert (sampling.dry_multiplier, sampling.dry_base, sampling.dry_allowed_length) == (0.8, 2, 3)
    assert sampling.dry_breakers == {97, 98}
    assert sampling.grammar == Grammar("regex", "[a-z]+")
    assert (stopping.max_tokens, stopping.min_tokens, stopping.ignore_eos) == (9, 2, True)
    assert stopping.stop_tokens == {1, 2}
    assert stopping.end_tokens == {256}


async def test_completion_defaults() -> None:
    engine = FakeEngine("x")
    await post({"top_k": -1}, engine)
    await post({}, engine)
    first, second = (request.sampling for request in engine.requests)
    assert (first.temperature, first.top_k, first.top_p, first.repetition_penalty) == (1.0, 0, 1.0, 1.0)
    assert first.seed != second.seed
    assert not first.seeded
    assert engine.requests[0].stopping.max_tokens == 16
    assert first.dry_breakers == frozenset()


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}},
            Grammar("json_schema", '{"type":"null"}'),
        ),
        ({"grammar": {"type": "json_schema", "value": {"type": "null"}}}, Grammar("json_schema", '{"type":"null"}')),
        ({"grammar": {"type": "json_schema", "value": '{"type": "null"}'}}, Grammar("json_schema", '{"type":"null"}')),
        ({"grammar": {"type": "lark", "value": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ],
)
async def test_completion_constraints(fields: dict[str, Any], grammar: Grammar | None) -> None:
    engine = FakeEngine("x")
    await post(fields, engine)
    assert engine.requests[0].sampling.grammar == grammar


async def test_completion_logprobs() -> None:
    body = await post({"prompt": "x", "logprobs": 1}, FakeEngine("hé"))
    validate_openai(body)
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["h", "bytes:\\xc3", "bytes:\\xa9", "<end>"],
        "token_logprobs": [-104 / 64, -195 / 64, -169 / 64, -4.0],
        "top_logprobs": [
            {"h": -104 / 64},
            {"bytes:\\xc3": -195 / 64},
            {"bytes:\\xa9": -169 / 64},
            {"\x06": -4.0, "<end>": -4.0},
        ],
        "text_offset": [0, 1, 1, 2],
    }


async def test_completion_logprobs_include_sampled_token() -> None:
    body = await post({"prompt": "x", "logprobs": 0}, FakeEngine("h"))
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [{"h": -104 / 64}, {"<end>": -4.0}]


@pytest.mark.parametrize("prompt", ["hé", [104, 195, 169], ["hé"], [[START, 104, 195, 169]]])
async def test_completion_scores_prompt_with_echo(prompt: Any) -> None:
    body = await post({"prompt": prompt, "logprobs": 1, "echo": True, "max_tokens": 0})
    choice = body["choices"][0]
    start = prompt == [[START, 104, 195, 169]]
    assert (choice["text"], choice["finish_reason"]) == ("hé", "length")
    assert choice["logprobs"]["tokens"][start:] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][-2:] == [-195 / 64, -169 / 64]
    assert choice["logprobs"]["text_offset"][start:] == [0, 1, 1]
    assert body["usage"]["completion_tokens"] == 0


async def test_completion_echo_and_suffix() -> None:
    body = await post({"prompt": ["a", "b"], "echo": True, "suffix": "!", "logprobs": 0}, FakeEngine("cd"))
    assert [choice["text"] for choice in body["choices"]] == ["acd!", "bcd!"]
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 2, 3]


async def test_completion_truncation_keeps_newest_tokens() -> None:
    engine = FakeEngine("x")
    body = {"prompt": "abcdefghij", "max_tokens": 15, "truncate_sequence": True, "echo": True}
    answer = await post(body, engine, model=fake_model(max_model_len=20))
    assert engine.requests[0].prompt == [*b"fghij"]
    assert answer["choices"][0]["text"] == "fghijx"


async def test_completion_best_of_returns_most_likely() -> None:
    engine = FakeEngine()
    texts = [b"zz", b"bb", b"cc"]
    engine.output_tokens = lambda request, choice: list(texts[choice])  # type: ignore[method-assign]
    body = await post({"prompt": "a", "best_of": 3, "n": 1}, engine)
    assert [choice["text"] for choice in body["choices"]] == ["bb"]
    assert body["usage"]["completion_tokens"] == 6


bodies = st.fixed_dictionaries(
    {"seed": st.integers(0, 1000), "prompt": st.sampled_from(["x", "hé", ["a", "", "b😀"], [104, 195], [[1], [2, 3]]])},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 40),
        "logprobs": st.integers(0, 5),
        "echo": st.booleans(),
        "suffix": st.sampled_from(["", "!", "é"]),
        "ignore_eos": st.booleans(),
        "stop": st.one_of(
            st.sampled_from(["a", "é", "\n"]),
            st.lists(st.text("abcde é😀", min_size=1, max_size=3), max_size=4),
        ),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_tokens_as_token_ids": st.booleans(),
        "return_token_offsets": st.booleans(),
        "prompt_logprobs": st.integers(0, 3),
    },
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies, at_once=st.integers(1, 4))
async def test_completion_stream_equals_body(body: dict[str, Any], at_once: int) -> None:
    whole = await post(body, FakeEngine(at_once=at_once))
    validate_openai(whole)
    streamed = await post(
        body | {"stream": True, "stream_options": {"include_usage": True}}, FakeEngine(at_once=at_once)
    )
    for each in (whole, streamed):
        del each["id"], each["created"]
    assert streamed == whole
    if body.get("return_token_ids"):
        assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        lists = choice["logprobs"]
        if lists is not None:
            assert len({len(values) for values in lists.values()}) == 1
            assert lists["text_offset"] == sorted(lists["text_offset"])
