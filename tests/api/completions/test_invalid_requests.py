"""Invalid completion requests: a 400 that names the field, before anything reaches the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from syringa.api.decoding import header_value
from tests.client import client
from tests.fake_engine import FakeEngine, fake_model

INVALID: list[tuple[dict[str, Any], str]] = [
    *[({name: value}, name) for name in ("temperature", "top_p", "min_p") for value in ("x", True, [], -0.1, 2.1)],
    *[({name: value}, name) for name in ("frequency_penalty", "presence_penalty") for value in ("1", -2.1, 2.1, {})],
    *[({"max_tokens": value}, "max_tokens") for value in (-1, 1.5, "5", True, 10**30, 0, [1])],
    *[({"n": value}, "n") for value in (0, 129, 1.5, "1", True)],
    *[({"best_of": value}, "best_of") for value in (0, 21, "2", True)],
    *[({"logprobs": value}, "logprobs") for value in (-1, 21, "1", True, 0.5)],
    *[({"top_k": value}, "top_k") for value in (-2, 1.5, "x", 10**20)],
    *[({"seed": value}, "seed") for value in ("x", 2**63, -(2**63) - 1, 0.5)],
    *[({"repetition_penalty": value}, "repetition_penalty") for value in (0, -1, "x")],
    *[({name: value}, name) for name in ("stream", "echo", "ignore_eos", "truncate_sequence") for value in (1, "true")],
    *[({"dry_multiplier": value}, "dry_multiplier") for value in (-1, "x")],
    ({"dry_base": 0.5}, "dry_base"),
    ({"dry_allowed_length": -1}, "dry_allowed_length"),
    ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": ["a", 1]}, "dry_sequence_breakers[1]"),
    ({"dry_sequence_breakers": ["a", ""]}, "dry_sequence_breakers[1]"),
    ({"top_p": 0}, "top_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"stop_token_ids": [1, "a"]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1, 258]}, "stop_token_ids[1]"),
    ({"stop": ""}, "stop"),
    ({"stop": 1}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logit_bias": {"258": 1}}, "logit_bias.258"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"7": 1, "07": -1}}, "logit_bias.07"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"logit_bias": {"1": True}}, "logit_bias.1"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias." + "9" * 5000),
    ({"prompt": 5}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, 1.5]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [1, 258]}, "prompt[1]"),
    ({"prompt": [1, 10**30]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": [[1], [2, "x"]]}, "prompt[1][1]"),
    ({"prompt": [[1], "x"]}, "prompt[1]"),
    ({"prompt": ["x"] * 2049}, "prompt"),
    ({"model": 5}, "model"),
    ({"user": 5}, "user"),
    ({"suffix": 5}, "suffix"),
    ({"stream_options": 5, "stream": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
    ({"stream_options": {}}, "stream_options"),
    ({"grammar": "x"}, "grammar"),
    ({"grammar": {"type": "regex"}}, "grammar"),
    ({"grammar": {"type": "regex", "value": 5}}, "grammar.value"),
    ({"grammar": {"type": "regex", "value": "("}}, "grammar.value"),
    ({"grammar": {"type": "bnf", "value": "x"}}, "grammar.type"),
    ({"grammar": {"type": 5, "value": "x"}}, "grammar.type"),
    ({"grammar": {"type": "json_schema", "value": "no json"}}, "grammar.value"),
    ({"grammar": {"type": "json_schema", "value": {"type": 5}}}, "grammar.value"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_object"}, "grammar": {"type": "regex", "value": "a"}}, "grammar"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "stream": True}, "best_of"),
    ({"tools": "x"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": 5}, "tool_choice"),
    ({"max_tokens": 5000}, "max_tokens"),
    ({"prompt": "x" * 4081}, "prompt"),
]


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=lambda value: str(value)[:60])
async def test_completions_reject_invalid_field(fields: dict[str, Any], param: str) -> None:
    engine = FakeEngine("x")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x"} | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"{", None),
        (b"[]", None),
        (b'"x"', None),
        (b"null", None),
        (b'{"prompt": "\xff"}', None),
        (b'{"\xff": 1}', None),
        (b'{"temperature": NaN}', None),
        (b'{"temperature": 1e999}', "temperature"),
        (b'{"max_tokens": 1e999}', "max_tokens"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"prompt": ' + b"[" * 100_000, None),
        (b'{"stop": ' + b"[" * 400 + b"]" * 400 + b"}", "stop[0]"),
        (b'{"x": 1e999, "y": ' + b"[" * 100_000, None),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_completions_reject_invalid_body(body: bytes, param: str | None) -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("text", ['"\\ud800"', '"\\ud800x"', '"\\udc00\\ud800"', '"\\u0000"'])
async def test_completions_never_fail_on_odd_strings(text: str) -> None:
    async with client() as http:
        answer = await http.post(
            "/v1/completions", content=f'{{"prompt": {text}}}', headers={"content-type": "application/json"}
        )
    assert answer.status_code in (200, 400)


async def test_completions_report_context_length_and_prompt_length() -> None:
    async with client(model=fake_model(max_model_len=20)) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x" * 11, "max_tokens": 10})
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "20" in error["message"]
    assert "11" in error["message"]


@pytest.mark.parametrize("value", [None, 1, 1.0])
async def test_completions_accept_null_and_integral_floats(value: object) -> None:
    names = ["n", "max_tokens", "logprobs", "best_of", "top_k", "seed", "min_tokens", "dry_allowed_length"]
    engine = FakeEngine("hello")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", content=json.dumps(dict.fromkeys(names, value)), headers=_JSON)
    assert answer.status_code == 200, answer.text
    assert type(engine.requests[0].sampling.seed) is int


_JSON = {"content-type": "application/json"}


async def test_completions_reject_long_prompt_before_tokenizing() -> None:
    engine = FakeEngine("x")
    async with client(engine) as http:
        answer = await http.post("/v1/completions", json={"prompt": "a" * 100_000})
        cut = await http.post("/v1/completions", json={"prompt": "a" * 100_000, "truncate_sequence": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert cut.status_code == 200
    assert len(engine.requests[0].prompt) == 4096 - 16


@pytest.mark.parametrize("field", ['"suffix": "\\ud800"', '"logit_bias": {"\\ud800": 1}', '"stop": "\\ud800"'])
async def test_completions_reject_lone_surrogates_beside_huge_numbers(field: str) -> None:
    async with client(FakeEngine("x")) as http:
        body = '{"prompt": "x", "zz": 1e400, ' + field + "}"
        answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stop": "a" * 1001}, "stop"),
        ({"stop": ["b", "a" * 1001]}, "stop[1]"),
    ],
)
async def test_completions_reject_long_stop_strings(fields: dict[str, Any], param: str) -> None:
    async with client(FakeEngine("x")) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_header_value_cuts_after_whole_names() -> None:
    assert header_value(["a", "b,c", "é"]) == "a, b\\x2cc, \\xe9"
    many = [f"unknown_{number}" for number in range(200)]
    value = header_value(many)
    assert len(value) <= 1024
    *names, rest = value.split(", ")
    assert rest == "..."
    assert names == many[: len(names)]
    assert len(names) > 70
    assert len(header_value(["x" * 5000])) == 1024


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"prompt": ["a", "b", "c"], "n": 2},
            "n: 2 choices of each of 3 prompts are 6; this server allows 4 per request (max_choices).",
        ),
        ({"prompt": "a", "best_of": 5}, "best_of: 5 choices are 5; this server allows 4 per request (max_choices)."),
        (
            {"prompt": [[1]] * 5},
            "prompt: 1 choices of each of 5 prompts are 5; this server allows 4 per request (max_choices).",
        ),
    ],
)
async def test_completion_refuses_more_choices_than_the_server_allows(fields: dict[str, Any], message: str) -> None:
    async with client(FakeEngine("x"), model=fake_model(max_choices=4)) as http:
        answer = await http.post("/v1/completions", json=fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["param"]) == (400, message, message.partition(":")[0])
        for allowed in ({"prompt": ["a", "b"], "n": 2}, {"prompt": [1] * 9, "best_of": 4}):
            assert (await http.post("/v1/completions", json=allowed)).status_code == 200
