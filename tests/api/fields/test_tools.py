"""Tests of tools in completions."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syringa.api.fields.tools import read_tools
from syringa.errors import InvalidRequest
from syringa.types import EngineRequest
from tests.api.completions.test_request import post
from tests.client import client, events
from tests.fake_engine import END, START, ByteTokenizer, FakeEngine, fake_model
from tests.schemas import reassemble, validate_openai
from tests.tiers import examples

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def function(name: str = "weather", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA} | fields}


def named(name: str = "weather") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [function(), function("time", description="Now.", parameters=None)]
ARGUMENTS = '{"city": "Zürich"}'
CALL = f'<tool_call>{{"name": "weather", "arguments": {ARGUMENTS}}}</tool_call>'
NOW = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
ASK = {"prompt": "Q: weather?\nA:", "tools": TOOLS, "max_tokens": 400}


async def refused(body: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    engine = FakeEngine("x")
    async with client(engine, **kwargs) as http:
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert not engine.requests
    return answer.json()["error"]


async def post_stream(body: dict[str, Any], engine: FakeEngine) -> dict[str, Any]:
    """Send a streamed request and return the body that its chunks make, with tool calls."""
    async with client(engine) as http:
        answer = await http.post(
            "/v1/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
        )
    assert answer.status_code == 200, answer.text
    seen = events(answer.text)
    calls: dict[int, list[Any]] = {}
    for choice in (choice for chunk in seen[:-1] for choice in chunk["choices"]):
        mine = calls.setdefault(choice["index"], [])
        for part in choice.get("tool_calls", []):
            if "id" in part:
                assert part.pop("index") == len(mine)
                mine.append(part)
            else:
                assert part.keys() == {"index", "function"}
                assert part["function"].keys() == {"arguments"}
                mine[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    whole = reassemble(seen)
    for choice in whole["choices"]:
        choice["tool_calls"] = calls[choice["index"]]
    return whole


@pytest.mark.parametrize("choice", [None, "auto", "required"])
async def test_completion_returns_tool_calls(choice: str | None) -> None:
    engine = FakeEngine(f"{CALL}\n{NOW}")
    body = await post(ASK | {"tool_choice": choice}, engine)
    validate_openai(body)
    (found,) = body["choices"]
    ids = [call.pop("id") for call in found["tool_calls"]]
    assert found == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "tool_calls",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}},
            {"type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
        "stop_reason": None,
    }
    assert len(set(ids)) == 2
    assert all(each.startswith("call_") for each in ids)
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert ("TEXT" in grammar.value) == (choice != "required")


async def test_completion_returns_text_before_a_call() -> None:
    body = await post(ASK, FakeEngine(f"I look it up.\n{CALL} Wait."))
    assert body["choices"][0]["text"] == "I look it up.\n"
    assert len(body["choices"][0]["tool_calls"]) == 1


async def test_completion_without_call() -> None:
    body = await post(ASK, FakeEngine("It rains <tool"))
    assert (body["choices"][0]["text"], body["choices"][0]["tool_calls"]) == ("It rains <tool", [])
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_completion_finishes_named_function_with_stop() -> None:
    engine = FakeEngine(CALL)
    for send in (post, post_stream):
        answer = await send(ASK | {"tool_choice": named()}, engine)
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert len(answer["choices"][0]["tool_calls"]) == 1
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "weather" in grammar.value
    assert "time" not in grammar.value


async def test_completion_returns_partial_call_at_max_tokens() -> None:
    body = await post(ASK | {"max_tokens": len(CALL.encode()) - 30}, FakeEngine(CALL))
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    (call,) = choice["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])


async def test_completion_puts_tools_before_prompt_and_not_into_echo() -> None:
    engine = FakeEngine(NOW)
    body = await post(ASK | {"echo": True, "logprobs": 0}, engine)
    prompt = bytes(engine.requests[0].prompt).decode()
    assert prompt.endswith("\n\n" + ASK["prompt"])
    assert '"name": "weather"' in prompt
    (choice,) = body["choices"]
    assert choice["text"] == ASK["prompt"]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == ASK["prompt"] + NOW + "<end>"
    length = len(ASK["prompt"])
    assert lists["text_offset"] == [*range(length), *[length] * (len(NOW) + 1)]
    assert lists["token_logprobs"] == [*(-ord(each) / 64 for each in ASK["prompt"] + NOW), -4.0]


@pytest.mark.parametrize(("prompt", "own"), [("", b""), (None, b""), ([104, 105], b"hi"), (["a", "b"], b"a")])
async def test_completion_prompt_forms_with_tools(prompt: Any, own: bytes) -> None:
    engine = FakeEngine("x")
    await post({"prompt": prompt, "tools": TOOLS}, engine)
    first = min(engine.requests, key=lambda request: request.prompt)
    assert START not in first.prompt
    assert bytes(first.prompt).endswith(b"\n\n" + own)


async def test_completion_truncation_keeps_tools() -> None:
    engine = FakeEngine("x")
    whole = await post({"prompt": "x", "tools": TOOLS}, engine)
    max_model_len = whole["usage"]["prompt_tokens"] + 2 + 16
    body = {"prompt": "abcdefgh", "tools": TOOLS, "truncate_sequence": True, "echo": True}
    answer = await post(body, engine, model=fake_model(max_model_len=max_model_len))
    assert answer["choices"][0]["text"] == "fghx"
    assert bytes(engine.requests[-1].prompt).startswith(b"You can call")
    error = await refused(body, model=fake_model(max_model_len=max_model_len - 4))
    assert error["code"] == "context_length_exceeded"


async def test_completion_tool_choice_none_returns_text() -> None:
    engine = FakeEngine(CALL)
    body = await post(ASK | {"tool_choice": "none"}, engine)
    assert (body["choices"][0]["text"], body["choices"][0]["tool_calls"]) == (CALL, [])
    assert bytes(engine.requests[0].prompt).decode() == ASK["prompt"]
    assert engine.requests[0].sampling.grammar is None


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "none", "auto"])
async def test_completion_without_tools_has_no_tool_calls(tools: Any, choice: Any) -> None:
    body = await post({"tools": tools, "tool_choice": choice}, FakeEngine(CALL))
    assert "tool_calls" not in body["choices"][0]


async def test_completion_best_of_with_tools() -> None:
    engine = FakeEngine()
    texts = [b"zzzzz", CALL.encode(), b"~~"]
    engine.output_tokens = lambda request, choice: [*texts[choice], END]  # type: ignore[method-assign]
    body = await post(ASK | {"best_of": 3, "n": 2}, engine)
    assert [len(choice["tool_calls"]) for choice in body["choices"]] == [1, 0]
    assert body["choices"][0]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS


async def test_completion_stream_sends_name_before_arguments() -> None:
    async with client(FakeEngine(f"Hm. {CALL}", at_once=3)) as http:
        answer = await http.post("/v1/completions", json=ASK | {"stream": True})
    chunks = [chunk["choices"][0] for chunk in events(answer.text)[:-1]]
    parts = [chunk["tool_calls"][0] for chunk in chunks if "tool_calls" in chunk]
    first, *rest = parts
    assert first.pop("id").startswith("call_")
    assert first == {"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}
    assert len(rest) > 3
    assert "".join(part["function"]["arguments"] for part in rest) == ARGUMENTS
    assert [chunk["finish_reason"] for chunk in chunks if chunk["finish_reason"]] == ["tool_calls"]


async def test_hosted_tools_are_ignored_and_named() -> None:
    hosted = [{"type": "web_search", "search_context_size": "low"}, {"type": "mcp", "server_url": "http://x"}]
    async with client(FakeEngine(NOW)) as http:
        plain = await http.post("/v1/completions", json=ASK | {"tools": TOOLS})
        both = await http.post("/v1/completions", json=ASK | {"tools": [*TOOLS, *hosted]})
        none = await http.post("/v1/completions", json=ASK | {"tools": hosted})
    number = len(TOOLS)
    assert both.headers["x-syringa-ignored"] == f"tools[{number}] (web_search), tools[{number + 1}] (mcp)"
    assert both.json()["usage"] == plain.json()["usage"]
    assert none.json()["usage"]["prompt_tokens"] < plain.json()["usage"]["prompt_tokens"]


async def test_hosted_tools_are_refused_by_a_server_that_is_set_to() -> None:
    with pytest.raises(InvalidRequest) as caught:
        await read_tools([*TOOLS, {"type": "web_search"}], None, [], unsupported="refuse")
    assert caught.value.param == f"tools[{len(TOOLS)}].type"


async def test_completion_reports_ignored_tool_fields() -> None:
    schema = {**SCHEMA, "properties": {"xs": {"type": "array", "uniqueItems": True}}, "required": []}
    tools = [{**function(parameters=schema), "cache": 1}]
    async with client(FakeEngine(NOW)) as http:
        held = await http.post("/v1/completions", json=ASK | {"tools": tools, "tool_choice": "required"})
        free = await http.post("/v1/completions", json=ASK | {"tools": tools})
    assert "tools[0].cache" in held.headers["x-syringa-ignored"]
    assert "uniqueItems" in held.headers["x-syringa-ignored"]
    assert free.headers["x-syringa-ignored"] == "tools[0].cache"
    strict = [function(parameters=schema, strict=True)]
    error = await refused(ASK | {"tools": strict})
    assert error["param"].startswith("tools[0].function.parameters.")


MANY = [function(f"f{index}") for index in range(129)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": {}}, "tools"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [{}]}, "tools[0]"),
        ({"tools": [TOOLS[0], {"type": "custom", "custom": {"name": "f"}}]}, "tools[1].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOLS[0], {"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        (
            {
                "tools": [TOOLS[0], {"type": "web_search"}],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "web_search"}]},
                },
            },
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("x" * 65)]}, "tools[0].function.name"),
        ({"tools": [function(), function()]}, "tools[1].function.name"),
        ({"tools": [function(description=5)]}, "tools[0].function.description"),
        ({"tools": [function(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [function(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(strict=True, parameters={"$ref": "#/no"})]}, "tools[0].function.parameters"),
        ({"tools": MANY}, "tools"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": named("no")}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [named(), named("x")]},
                }
            },
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": named()}, "tool_choice"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"suffix": "x"}, "suffix"),
    ],
    ids=lambda value: str(value)[:60],
)
async def test_completion_rejects_invalid_tools(fields: dict[str, Any], param: str) -> None:
    error = await refused(ASK | fields)
    assert error["param"] == param, error


async def test_completion_allowed_tools() -> None:
    engine = FakeEngine(NOW)
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named("time")]}}
    body = await post(ASK | {"tool_choice": choice, "response_format": {"type": "text"}}, engine)
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    grammar = engine.requests[0].sampling.grammar
    assert grammar is not None
    assert "weather" not in grammar.value
    assert "weather" in bytes(engine.requests[0].prompt).decode()


class CallingEngine(FakeEngine):
    """Generates a mix of calls, parts of them and text that depends on the seed."""

    parts = (CALL, NOW, "é ", "\n", "<tool_call>", "x<", CALL[:40], "😀", "</tool_call>")

    def output_tokens(self, request: EngineRequest, choice: int) -> list[int]:
        seed = request.sampling.seed + choice
        script = "".join(self.parts[seed // 9**place % 9] for place in range(5))
        return [*script.encode(), END][: request.stopping.max_tokens]


bodies = st.fixed_dictionaries(
    {"seed": st.integers(0, 9**5), "prompt": st.sampled_from(["x", ["a", "b😀"], [104, 195]])},
    optional={
        "n": st.integers(1, 3),
        "max_tokens": st.integers(1, 300),
        "logprobs": st.integers(0, 2),
        "echo": st.booleans(),
        "tool_choice": st.sampled_from(["none", "auto", "required", named()]),
        "stop": st.sampled_from(["x", "é", '"}', ["\n", "😀"]]),
    },
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(body=bodies, at_once=st.integers(1, 9))
async def test_completion_stream_with_tools_equals_body(body: dict[str, Any], at_once: int) -> None:
    body |= {"tools": TOOLS}
    whole = await post(body, CallingEngine(at_once=at_once))
    validate_openai(whole)
    streamed = await post_stream(body, CallingEngine())
    for each in (whole, streamed):
        del each["id"], each["created"]
        for choice in each["choices"]:
            for call in choice["tool_calls"]:
                assert call.pop("id").startswith("call_")
    assert streamed == whole
    for choice in whole["choices"]:
        if (lists := choice["logprobs"]) is not None:
            assert len({len(values) for values in lists.values()}) == 1
            assert lists["text_offset"] == sorted(lists["text_offset"])
        if choice["finish_reason"] == "tool_calls":
            assert choice["tool_calls"]


class FillingTokenizer(ByteTokenizer):
    """A tokenizer with StarCoder's fill-in-the-middle tokens, which are the bytes 1 to 4."""

    def token_id(self, text: str) -> int | None:
        return {"<fim_prefix>": 1, "<fim_suffix>": 2, "<fim_middle>": 3, "<fim_pad>": 4}.get(text)


@pytest.mark.parametrize(("prompt", "text"), [("ab", "ab"), ([97, 98], "ab"), ("", ""), (None, "")])
async def test_completion_suffix_uses_fim_tokens(prompt: Any, text: str) -> None:
    engine = FakeEngine("mid")
    model = fake_model(tokenizer=FillingTokenizer())
    body = await post({"prompt": prompt, "suffix": "yz"}, engine, model=model)
    assert engine.requests[0].prompt == [1, *text.encode(), 2, *b"yz", 3]
    assert engine.requests[0].stopping.end_tokens == {END, 1, 2, 3, 4}
    assert body["choices"][0]["text"] == "mid"
    body = await post({"prompt": prompt, "suffix": "yz", "echo": True, "logprobs": 0}, engine, model=model)
    assert body["choices"][0]["text"] == text + "midyz"
    assert body["choices"][0]["logprobs"]["tokens"] == [*text, *"mid", "<end>"]
    assert body["choices"][0]["logprobs"]["text_offset"] == [*range(len(text + "mid") + 1)]
    await post({"prompt": prompt, "suffix": ""}, engine, model=model)
    assert engine.requests[-1].prompt == [*text.encode()] or not text


async def test_completion_truncates_fim_prefix() -> None:
    engine = FakeEngine("mid")
    model = fake_model(tokenizer=FillingTokenizer(), max_model_len=26)
    body = {"prompt": "abcdefgh", "suffix": "yz", "truncate_sequence": True}
    await post(body, engine, model=model)
    assert engine.requests[0].prompt == [1, *b"defgh", 2, *b"yz", 3]
    error = await refused(body | {"suffix": "y" * 7}, model=model)
    assert error["code"] == "context_length_exceeded"
