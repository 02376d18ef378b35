"""Fields of vLLM and llama.cpp: other names of fields, fields without effect, and refused ones."""

from __future__ import annotations

from typing import Any

import pytest

from syringa.api.fields import compatibility
from syringa.api.fields.compatibility import CompatibilityFields
from syringa.api.fields.schema import IGNORED, REFUSED
from syringa.api.openapi.document import request_fields
from syringa.config import Config
from tests.chat_models import plain_model, reasoning_model
from tests.client import client, events
from tests.fake_engine import FakeEngine

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi", "store": False},
}
PATHS = sorted(BODIES)
# Values that ask for something, of every ignored field that is reported.
ASKING: dict[str, Any] = {
    "session_id": "s", "vllm_xargs": {"a": 1}, "kv_transfer_params": {"a": 1}, "ec_transfer_params": {"a": 1},
    "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": {}}, "repetition_detection": {"max_pattern_size": 2},
    "routed_experts_prompt_start": 1, "return_assistant_tokens_mask": True, "enable_response_messages": True,
    "early_stopping": True, "typical_p": 0.9, "top_n_sigma": 1.0, "xtc_probability": 0.5, "dynatemp_range": 0.2,
    "mirostat": 2, "adaptive_target": 0.5, "repeat_last_n": 64, "dry_penalty_last_n": 64, "min_keep": 2,
    "samplers": ["top_k"], "id_slot": 0, "n_keep": 5, "n_discard": 5, "n_cache_reuse": 5, "n_indent": 2,
    "t_max_predict_ms": 100, "t_max_prompt_ms": 100, "post_sampling_probs": True, "return_tokens": True,
    "return_progress": True, "timings_per_token": True, "response_fields": ["content"], "verbose": True,
    "sse_ping_interval": 5, "parse_tool_calls": False, "reasoning_format": "none", "reasoning_control": True,
    "reasoning_budget_message": "stop", "reasoning_budget_start_tag": "<a>", "reasoning_budget_end_tag": "<b>",
    "reasoning_budget_end_tags": ["<b>"], "generation_prompt": "x", "chat_format": 1, "chat_parser": "x",
    "grammar_lazy": True, "grammar_triggers": [{}], "grammar_type": "x", "preserved_tokens": ["x"],
}  # fmt: skip


def test_every_field_is_honored_ignored_or_refused() -> None:
    fields = request_fields(CompatibilityFields)
    own = CompatibilityFields.__annotations__
    honored = {name for name in own if not fields[name].get(IGNORED) and not fields[name].get(REFUSED)}
    assert honored == {"repeat_penalty", "cache_prompt"}
    reported = {name for name in own if fields[name].get(IGNORED)} - compatibility._NOT_REPORTED
    assert reported == ASKING.keys()


@pytest.mark.parametrize("path", PATHS)
async def test_field_without_effect_is_reported_where_it_asks_for_something(path: str) -> None:
    neutral = {name: value for name, value in compatibility._NEUTRAL.items() if value is not None}
    quiet = {"xtc_threshold": 0.1, "mirostat_tau": 5.0, "backend_sampling": True, "reasoning_format": "deepseek"}
    async with client(model=plain_model()) as http:
        answer = await http.post(path, json=BODIES[path] | neutral)
        assert (answer.status_code, answer.headers.get("x-syringa-ignored")) == (200, None), answer.text
        answer = await http.post(path, json=BODIES[path] | quiet)
        assert (answer.status_code, answer.headers.get("x-syringa-ignored")) == (200, None)
        answer = await http.post(path, json=BODIES[path] | ASKING)
        assert answer.status_code == 200, answer.text
        named = answer.headers["x-syringa-ignored"].split(", ")
        assert set(named) == ASKING.keys()
    async with client(config=Config(unknown_fields="refuse"), model=plain_model()) as http:
        assert (await http.post(path, json=BODIES[path] | neutral)).status_code == 200
        refused = await http.post(path, json=BODIES[path] | {"mirostat": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "mirostat")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "field",
    [
        {"lora": [{"id": 0, "scale": 1.0}]},
        {"logits_processors": ["os.system"]},
        {"prompt_embeds": "AAAA"},
        {"previous_input_messages": []},
        {"previous_input_messages": [{"role": "user"}]},
    ],
)
async def test_field_that_would_change_the_model_or_prompt_is_refused(path: str, field: dict[str, Any]) -> None:
    engine = FakeEngine("x")
    async with client(engine, model=plain_model()) as http:
        answer = await http.post(path, json=BODIES[path] | field)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(field)))
        assert (await http.post(path, json=BODIES[path] | {"lora": [], "logits_processors": []})).status_code == 200
    assert len(engine.requests) == 1


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("field", [{"mirostat": "2"}, {"reasoning_format": "loud"}, {"samplers": [1]}, {"lora": "a"}])
async def test_malformed_value_of_field_without_effect_is_refused(path: str, field: dict[str, Any]) -> None:
    async with client(model=plain_model()) as http:
        answer = await http.post(path, json=BODIES[path] | field)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(next(iter(field)))


@pytest.mark.parametrize("path", PATHS)
async def test_repeat_penalty_and_cache_prompt_reach_the_engine(path: str) -> None:
    engine = FakeEngine("x")
    async with client(engine, model=plain_model()) as http:
        for fields in (
            {"repeat_penalty": 1.3, "cache_prompt": False},
            {"repeat_penalty": 1.3, "repetition_penalty": 1.1, "cache_prompt": True},
            {},
        ):
            answer = await http.post(path, json=BODIES[path] | fields)
            assert "x-syringa-ignored" not in answer.headers
    assert [request.sampling.repetition_penalty for request in engine.requests] == [1.3, 1.1, 1.0]
    assert [request.use_cache for request in engine.requests] == [False, True, True]


@pytest.mark.parametrize("path", PATHS)
async def test_seed_of_minus_one_is_random(path: str) -> None:
    engine = FakeEngine("x")
    async with client(engine, model=plain_model()) as http:
        for seed in (-1, -1, -2, -2):
            await http.post(path, json=BODIES[path] | {"seed": seed})
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] != seeds[1]
    assert seeds[2] == seeds[3] == 2**63 - 2


@pytest.mark.parametrize("path", PATHS[:2])
async def test_llama_cpp_names_of_length_choices_and_logprobs(path: str) -> None:
    engine = FakeEngine("hello world")
    async with client(engine, model=plain_model()) as http:
        body = BODIES[path] | {"n_predict": 3, "max_tokens": 9, "n_cmpl": 2, "n_probs": 1}
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert "x-syringa-ignored" not in answer.headers
        choices = answer.json()["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length", "length"]
        assert all(choice["logprobs"] for choice in choices)
        await http.post(path, json=BODIES[path] | {"n": 1, "n_cmpl": 2, "n_probs": 0})
        await http.post(path, json=BODIES[path] | {"n_predict": -1, "max_tokens": 2})
    first, second, third = engine.requests
    assert (first.stopping.max_tokens, first.choices, first.logprobs) == (3, 2, 1)
    assert (second.choices, second.logprobs) == (1, None)
    assert third.stopping.max_tokens >= 4096 - len(third.prompt)


async def test_n_predict_of_zero_is_refused_in_chat_and_only_scores_in_completions() -> None:
    async with client(model=plain_model()) as http:
        chat = await http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"] | {"n_predict": 0})
        assert (chat.status_code, chat.json()["error"]["param"]) == (400, "n_predict")
        body = {"prompt": "hi", "n_predict": 0, "echo": True, "logprobs": 0}
        assert (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"] == "hi"
        long = await http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"] | {"n_predict": 5000})
        assert (long.status_code, long.json()["error"]["param"]) == (400, "n_predict")


async def test_unlimited_completion_fits_whatever_the_context_leaves() -> None:
    engine = FakeEngine("x" * 200)
    async with client(engine, model=plain_model(max_model_len=64)) as http:
        body = {"prompt": ["a" * 10, "b" * 60], "n_predict": -1, "min_tokens": 2}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        full = await http.post("/v1/completions", json={"prompt": "a" * 64, "n_predict": -1})
        assert full.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({"reasoning_budget_tokens": 3}, 3),
        ({"thinking_budget_tokens": 4}, 4),
        ({"reasoning_budget_tokens": 3, "thinking_budget_tokens": 4}, 3),
        ({"reasoning_budget_tokens": 3, "thinking_token_budget": 7}, 7),
    ],
)
async def test_llama_cpp_names_of_the_reasoning_budget(fields: dict[str, int], budget: int) -> None:
    async def grammar(body: dict[str, Any]) -> Any:
        engine = FakeEngine("x")
        async with client(engine, model=reasoning_model()) as http:
            answer = await http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"] | body)
        assert answer.status_code == 200, answer.text
        return engine.requests[0].sampling.grammar

    found = await grammar(fields)
    assert found is not None
    assert found == await grammar({"thinking_token_budget": budget})


async def test_reasoning_budget_of_completions_is_reported() -> None:
    async with client() as http:
        answer = await http.post("/v1/completions", json={"prompt": "hi", "thinking_token_budget": 5})
        assert answer.headers["x-syringa-ignored"] == "thinking_token_budget"
        answer = await http.post("/v1/completions", json={"prompt": "hi", "thinking_token_budget": -1})
        assert "x-syringa-ignored" not in answer.headers


async def test_image_fields_of_tokenize_are_reported() -> None:
    async with client() as http:
        body = {"prompt": "hi", "mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {}}
        answer = await http.post("/tokenize", json=body)
    assert answer.headers["x-syringa-ignored"] == "mm_processor_kwargs"


@pytest.mark.parametrize("path", PATHS[:2])
@pytest.mark.parametrize("interval", [None, 1, 3, 100])
async def test_stream_interval_joins_chunks(path: str, interval: int | None) -> None:
    body = BODIES[path] | {"stream": True, "max_tokens": 50, "stream_interval": interval}
    async with client(FakeEngine("hello world"), model=plain_model()) as http:
        answer = await http.post(path, json=body)
    chunks = [chunk["choices"][0] for chunk in events(answer.text)[:-1]]
    texts = [chunk["text"] if "text" in chunk else chunk["delta"].get("content") for chunk in chunks]
    texts = [text for text in texts if text]
    assert "".join(texts) == "hello world"
    assert chunks[-1]["finish_reason"] == "stop"
    expected = {3: ["h", "ell", "o w", "orl", "d"], 100: ["h", "ello world"]}.get(interval or 1, list("hello world"))
    assert texts == expected
