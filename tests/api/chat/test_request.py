"""Tests of `/v1/chat/completions`: request fields, prompts, output and streams."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syringa.config import Config
from syringa.types import EngineRequest, Grammar, Image
from tests.api.chat.helpers import HI, post, prompt_of, refused, send
from tests.api.chat.test_tools import HERMES
from tests.api.fields.test_tools import NOW, TOOLS
from tests.chat_models import plain_model, reasoning_model, tool_model, vision_model
from tests.client import events
from tests.fake_engine import END, FakeEngine, fake_model
from tests.tiers import examples

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJg"
    "gg=="
)


async def test_chat_body() -> None:
    body = await post({"model": "alias"})
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 1.7e9
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "system_fingerprint": "fp_unknown",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "hello",
                    "refusal": None,
                    "annotations": [],
                    "tool_calls": [],
                },
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 6,
            "total_tokens": 14,
            "prompt_tokens_details": {"cached_tokens": 4},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


async def test_chat_is_served_on_both_paths() -> None:
    for path in ("/v1/chat/completions", "/api/v2/chat/completions"):
        assert (await post({}, path=path))["choices"][0]["message"]["content"] == "hello"


async def test_chat_sampling_fields_reach_the_engine() -> None:
    engine = FakeEngine("x")
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "frequency_penalty": 1,
        "presence_penalty": -1, "repetition_penalty": 1.5, "dry_multiplier": 0.8, "dry_base": 2,
        "dry_allowed_length": 3,
    }  # fmt: skip
    more = {
        "max_tokens": 9, "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [1, 2], "n": 2, "logit_bias": {"5": 1},
        "grammar": {"type": "regex", "value": "[a-z]+"}, "user": "u", "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    await post(body | more, engine)
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in body} == body
    assert request.sampling.grammar == Grammar("regex", "[a-z]+")
    assert request.sampling.logit_bias == {5: 1}
    assert (request.stopping.max_tokens, request.stopping.min_tokens, request.stopping.ignore_eos) == (9, 2, True)
    assert (request.stopping.stop_tokens, request.stopping.end_tokens) == ({1, 2}, {END})
    assert (request.choices, request.logprobs) == (2, 3)


@pytest.mark.parametrize(
    ("fields", "length"),
    [
        ({}, 4096 - 8),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 4096 - 8}, 4096 - 8),
    ],
)
async def test_chat_max_tokens(fields: dict[str, Any], length: int) -> None:
    engine = FakeEngine("x")
    await post(fields, engine)
    assert engine.requests[0].stopping.max_tokens == length


async def test_chat_prompt_is_exactly_the_template() -> None:
    messages = [{"role": "system", "content": "Be kind."}, *HI]
    assert await prompt_of({"messages": messages}) == "[s]Be kind.[u]hi[a]"
    assert await prompt_of({"messages": messages, "add_generation_prompt": False}) == "[s]Be kind.[u]hi"


async def test_chat_continues_final_message() -> None:
    messages = [*HI, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True}
    assert await prompt_of(body) == "[u]hi[a]Well, "
    error = await refused(body | {"add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


async def test_chat_logprobs() -> None:
    body = await post({"logprobs": True, "top_logprobs": 2}, FakeEngine("é"))
    first, second, end = body["choices"][0]["logprobs"]["content"]
    assert first == {
        "token": "bytes:\\xc3",
        "logprob": -195 / 64,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "bytes:\\xc3", "logprob": -195 / 64, "bytes": [0xC3]},
            {"token": "bytes:\\xc4", "logprob": -195 / 64 - 1, "bytes": [0xC4]},
        ],
    }
    assert bytes(first["bytes"] + second["bytes"]).decode() == "é"
    assert (end["token"], end["bytes"]) == ("<end>", None)
    body = await post({"logprobs": True}, FakeEngine("a"))
    assert [each["top_logprobs"] for each in body["choices"][0]["logprobs"]["content"]] == [[], []]


async def test_chat_stream_without_usage() -> None:
    chunks = events((await send({"stream": True})).text)
    assert chunks.pop() == "[DONE]"
    assert all("usage" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["delta"] == {}


def image_message(**fields: Any) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": PIXEL} | fields}
    return {"role": "user", "content": [{"type": "text", "text": "What is "}, part, {"type": "text", "text": "?"}]}


async def test_chat_images_reach_the_engine() -> None:
    engine = FakeEngine("a pixel")
    await post({"messages": [image_message(), image_message(detail="low")]}, engine, model=vision_model())
    assert bytes(engine.requests[0].prompt) == b"[user]What is <image>?" * 2 + b"[assistant]"
    first, second = engine.requests[0].images
    assert isinstance(first, Image)
    assert (first.digest, first.detail, second.detail) == (second.digest, "auto", "low")
    assert first.data.startswith(b"\x89PNG")


async def test_chat_rejects_unsupported_images() -> None:
    error = await refused({"messages": [*HI, image_message()]})
    assert error["param"] == "messages[1].content[1]"
    assert "does not support images" in error["message"]
    error = await refused({"messages": [image_message(url="data:image/png;base64,AAAA")]}, model=vision_model())
    assert error["param"] == "messages[0].content[1].image_url.url"
    error = await refused({"messages": [image_message(url="http://127.0.0.1/x.png")]}, model=vision_model())
    assert error["param"] == "messages[0].content[1].image_url.url"
    error = await refused({"messages": [image_message()]}, model=plain_model(supports_images=True))
    assert error["param"] == "messages[0].content"


TURNS = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three"},
]


@pytest.mark.parametrize(
    ("limit", "prompt"),
    [
        (37, "[s]S[u]one[a]1[u]two[a]2[u]three[a]"),
        (36, "[s]S[u]two[a]2[u]three[a]"),
        (27, "[s]S[u]two[a]2[u]three[a]"),
        (26, "[s]S[u]three[a]"),
        (17, "[s]S[u]three[a]"),
        (3, "[s]S[u]three[a]"),
    ],
)
async def test_chat_truncation_drops_oldest_turns(limit: int, prompt: str) -> None:
    body = {"messages": TURNS, "max_tokens": 2, "truncate_sequence": True}
    model = plain_model(max_model_len=limit)
    if limit == 3:
        error = await refused(body, model=model)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    else:
        assert await prompt_of(body, model=model) == prompt


async def test_chat_truncation_drops_as_little_as_possible() -> None:
    messages = [each for index in range(300) for each in ({"role": "user", "content": f"q{index}" * 9}, TURNS[2])]
    body = {"messages": messages[:-1], "truncate_sequence": True}
    engine = FakeEngine("x")
    whole = await post(body, engine)
    assert 4096 - 100 < len(engine.requests[0].prompt) < 4096
    assert whole["choices"][0]["finish_reason"] in ("stop", "length")
    error = await refused(body | {"truncate_sequence": False})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_chat_reports_context_length_and_prompt_length() -> None:
    error = await refused({"max_completion_tokens": 30}, model=plain_model(max_model_len=37))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert all(number in error["message"] for number in ("37", "8", "30", "max_completion_tokens"))
    error = await refused({}, model=plain_model(max_model_len=8))
    assert error["code"] == "context_length_exceeded"
    error = await refused({"messages": [{"role": "user", "content": "x" * 100_000}]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_chat_needs_a_chat_template() -> None:
    error = await refused({}, model=fake_model())
    assert "--chat-template" in error["message"]


async def test_chat_reports_ignored_fields() -> None:
    honored = {"user": "u", "store": False, "service_tier": "auto", "verbosity": "medium", "modalities": ["text"]}
    assert "x-syringa-ignored" not in (await send(honored)).headers
    assert (await post({"metadata": {"a": "b"}}))["metadata"] == {"a": "b"}
    unsupported = {
        "service_tier": "flex",
        "verbosity": "low",
        "prompt_cache_key": "k",
        "metadata": {"a": "b"},
        "stream": True,
    }
    assert (await send(unsupported)).headers[
        "x-syringa-ignored"
    ] == "service_tier, verbosity, prompt_cache_key, metadata"
    both = {"user": "u", "safety_identifier": "s"}
    assert (await send(both)).headers["x-syringa-ignored"] == "safety_identifier"
    answer = await send(unsupported, config=Config(unknown_fields="refuse"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "service_tier")


class MixedOutputEngine(FakeEngine):
    """Generates a mix of reasoning, calls, parts of them and text that depends on the seed."""

    parts = (HERMES, "é ", "\n", "<tool_call>", "x<", HERMES[:40], "😀", NOW, "</think>")

    def output_tokens(self, request: EngineRequest, choice: int) -> list[int]:
        seed = request.sampling.seed + choice
        script = "<think>hm 😀</think>\n" * (seed % 2)
        script += "".join(self.parts[seed // 9**place % 9] for place in range(5))
        return [*script.encode(), END][: request.stopping.max_tokens]


bodies = st.fixed_dictionaries(
    {"seed": st.integers(0, 9**5)},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 300),
        "logprobs": st.booleans(),
        "tools": st.just(TOOLS),
        "stop": st.sampled_from(["x", "é", '"}', ["\n", "😀"]]),
        "reasoning_effort": st.sampled_from(["none", "low"]),
        "parallel_tool_calls": st.booleans(),
        "include_reasoning": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
        "return_prompt_text": st.booleans(),
        "return_token_offsets": st.booleans(),
        "prompt_logprobs": st.integers(0, 3),
    },
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies, at_once=st.integers(1, 9), model=st.sampled_from([plain_model(), tool_model(), reasoning_model()]))
async def test_chat_stream_equals_body(body: dict[str, Any], at_once: int, model: Any) -> None:
    whole = await post(body, MixedOutputEngine(at_once=at_once), model=model)
    streamed = await post(
        body | {"stream": True, "stream_options": {"include_usage": True}},
        MixedOutputEngine(at_once=at_once),
        model=model,
    )
    for each in (whole, streamed):
        del each["id"], each["created"]
        for choice in each["choices"]:
            for call in choice["message"]["tool_calls"]:
                assert call.pop("id").startswith("call_")
    assert streamed == whole
    if body.get("return_token_ids"):
        assert sum(len(choice["token_ids"]) for choice in whole["choices"]) == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        assert choice["finish_reason"] != "tool_calls" or choice["message"]["tool_calls"]
        assert choice["message"]["content"] is not None or choice["message"]["tool_calls"]
