"""Tests of default values of request fields."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.api.chat.request import ChatRequest
from syringa.api.completions.request import CompletionRequest, prepare_completion
from syringa.api.fields.defaults import FIELDS, apply_defaults, read_defaults
from syringa.api.models.served_model import FixedModels
from syringa.api.responses import ResponseRequest
from syringa.errors import InvalidRequest
from tests.fake_engine import fake_model


def test_read_defaults_accepts_sampling_fields() -> None:
    fields: dict[str, Any] = {
        "temperature": 0.5, "top_k": 40.0, "stop": "x", "logit_bias": {"5": 1}, "dry_multiplier": 0.5, "max_tokens": 9,
    }  # fmt: skip
    assert read_defaults(fields) == fields
    assert type(read_defaults(fields)["top_k"]) is int
    assert read_defaults({"top_p": None}) == {}


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({"temperature": 3}, "temperature: expected `float` <= 2", "temperature"),
        ({"temprature": 1}, "temprature: no such field; did you mean 'temperature'?", "temprature"),
        ({"zzz": 1}, "known fields: temperature", "zzz"),
        ({"n": 2}, "n: cannot have a default", "n"),
        ({"response_format": {"type": "text"}}, "cannot have a default", "response_format"),
        ({"stop": [1]}, "expected a string", "stop[0]"),
        ({"logit_bias": {"x": 1}}, "expected a token id as key", "logit_bias.x"),
        ({"logit_bias": {"1": 1000}}, "from -100 to 100", "logit_bias.1"),
        ({"max_tokens": 0}, "at least 1", "max_tokens"),
        ({"top_k": "4"}, "expected", "top_k"),
    ],
)
def test_read_defaults_rejects_invalid_fields(fields: dict[str, Any], expected: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_defaults(fields)
    assert expected.replace("`", "") in caught.value.message
    assert caught.value.param == param


def test_apply_defaults_keeps_fields_of_the_request() -> None:
    model = fake_model(defaults={"temperature": 0.5, "top_k": 4, "max_tokens": 7})
    body = apply_defaults(CompletionRequest(temperature=0.0), model)
    assert (body.temperature, body.top_k, body.top_p, body.max_tokens) == (0.0, 4, None, 7)
    plain = CompletionRequest()
    assert apply_defaults(plain, fake_model()) is plain


def test_apply_defaults_maps_max_tokens_to_each_endpoint() -> None:
    model = fake_model(defaults={"max_tokens": 7})
    assert apply_defaults(ChatRequest(messages=[]), model).length == 7
    assert apply_defaults(ChatRequest(messages=[], max_tokens=3), model).length == 3
    assert apply_defaults(ResponseRequest(), model).max_output_tokens == 7
    assert apply_defaults(ResponseRequest(max_output_tokens=5), model).max_output_tokens == 5


def test_apply_defaults_skips_min_tokens_above_max_tokens() -> None:
    model = fake_model(defaults={"min_tokens": 7})
    assert apply_defaults(CompletionRequest(max_tokens=3), model).min_tokens is None
    assert apply_defaults(CompletionRequest(max_tokens=8), model).min_tokens == 7


def test_defaults_are_fields_of_every_endpoint() -> None:
    for wire in (CompletionRequest, ChatRequest, ResponseRequest):
        assert set(FIELDS) - {"max_tokens"} <= set(wire.__struct_fields__)


async def test_defaults_reach_the_engine() -> None:
    models = FixedModels([fake_model(defaults={"temperature": 0.25, "stop": "x"})])
    call = await prepare_completion(CompletionRequest(prompt="hi"), models, [])
    assert call.request.sampling.temperature == 0.25
    assert call.request.stop == ("x",)
