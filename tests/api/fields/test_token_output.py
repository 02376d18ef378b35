"""vLLM's request extensions in chat completions and completions: sampling, stopping, prompts and token-level output."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from syringa.api.fields.token_output import token_offsets
from syringa.config import Config
from syringa.types import EngineDelta, EngineRequest
from tests.api.chat.helpers import HI
from tests.chat_models import OPENING, plain_model, reasoning_model
from tests.client import client, events
from tests.fake_engine import END, START, FakeEngine, fake_model
from tests.schemas import validate_openai

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
SPEAKERS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
KNOWN_ROLES = SPEAKERS.replace("[{{", "{% if m.role in ('user', 'critic') %}[{{").replace(
    "{% endfor", "{% endif %}{% endfor"
)
DOCUMENTS = "{% for d in documents or [] %}<{{ d.title }}: {{ d.text }}>{% endfor %}" + SPEAKERS
SCHEMAS = {CHAT: "CreateChatCompletionResponse", COMPLETIONS: "CreateCompletionResponse"}


async def send(path: str, body: dict[str, Any], engine: FakeEngine | None = None, **kwargs: Any) -> httpx.Response:
    kwargs.setdefault("model", plain_model())
    default = {"messages": HI} if path == CHAT else {"prompt": "hi"}
    async with client(engine or FakeEngine("hello"), **kwargs) as http:
        return await http.post(path, json=default | body)


async def post(path: str, body: dict[str, Any], engine: FakeEngine | None = None, **kwargs: Any) -> dict[str, Any]:
    answer = await send(path, body, engine, **kwargs)
    assert answer.status_code == 200, answer.text
    assert "x-syringa-ignored" not in answer.headers
    validate_openai(answer.json(), SCHEMAS[path])
    return answer.json()


async def refused(path: str, body: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    engine = FakeEngine("x")
    answer = await send(path, body, engine, **kwargs)
    assert answer.status_code == 400, answer.text
    assert not engine.requests
    return answer.json()["error"]


async def chunks_of(path: str, body: dict[str, Any], engine: FakeEngine | None = None, **kwargs: Any) -> list[Any]:
    answer = await send(path, body | {"stream": True}, engine, **kwargs)
    assert answer.status_code == 200, answer.text
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    return chunks


async def engine_request(path: str, body: dict[str, Any], **kwargs: Any) -> EngineRequest:
    engine = FakeEngine("x")
    await post(path, body, engine, **kwargs)
    return engine.requests[0]


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@BOTH
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 258]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"allowed_token_ids": "1"}, "allowed_token_ids"),
        ({"bad_words": ["a", ""]}, "bad_words[1]"),
        ({"bad_words": "a"}, "bad_words"),
        ({"bad_words": ["a"] * 1025}, "bad_words"),
        ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5000}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 5, "truncation_side": "middle"}, "truncation_side"),
        ({"priority": 0.5}, "priority"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "a b"}, "request_id"),
        ({"request_id": "a\n"}, "request_id"),
        ({"request_id": "a" * 129}, "request_id"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprobs": 1, "logprob_token_ids": [258]}, "logprob_token_ids[0]"),
        ({"logprobs": 1, "logprob_token_ids": []}, "logprob_token_ids"),
        ({"stream_options": {"continuous_usage_stats": 3}, "stream": True}, "stream_options.continuous_usage_stats"),
    ],
)
async def test_invalid_extension_is_refused_by_name(path: str, body: dict[str, Any], param: str) -> None:
    if path == CHAT and "logprobs" in body:
        body = body | {"logprobs": True}
    assert (await refused(path, body))["param"] == param


@BOTH
async def test_allowed_tokens_and_bad_words_reach_the_engine(path: str) -> None:
    sampling = (await engine_request(path, {"allowed_token_ids": [7, 5, 7], "bad_words": [" ab", "c", " "]})).sampling
    assert sampling.allowed_tokens == {5, 7}
    assert set(sampling.bad_words) == {(*b"ab",), (*b" ab",), (*b"c",), (*b" c",), (*b" ",)}


@BOTH
async def test_output_without_a_token_left_is_a_client_error(path: str) -> None:
    engine = FakeEngine("x")
    engine._delta = lambda request, *_, **__: EngineDelta(  # type: ignore[method-assign]
        request.id, 0, finish="error", error="No token is left.", error_kind="no_token"
    )
    answer = await send(path, {"allowed_token_ids": [1]}, engine)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "allowed_token_ids")


@BOTH
@pytest.mark.parametrize("count", [1, 64])
async def test_stop_reason_is_the_stop_string(path: str, count: int) -> None:
    stop = ["l", *(f"never{index}" for index in range(count - 1))]
    body = await post(path, {"stop": stop})
    (choice,) = body["choices"]
    assert (text_of(choice), choice["finish_reason"], choice["stop_reason"]) == ("he", "stop", "l")
    chunks = [choice for chunk in await chunks_of(path, {"stop": stop}) for choice in chunk["choices"]]
    assert [chunk["stop_reason"] for chunk in chunks if "stop_reason" in chunk] == ["l"]
    assert chunks[-1]["stop_reason"] == "l"


@BOTH
@pytest.mark.parametrize(
    ("body", "text", "reason"),
    [
        ({}, "hello", None),
        ({"max_tokens": 2}, "he", None),
        ({"stop_token_ids": [END]}, "hello", None),
        ({"stop_token_ids": [END], "ignore_eos": True, "max_tokens": 2}, "he", None),
        ({"skip_special_tokens": False}, "hello", None),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "hello<end>", None),
        ({"stop": "l", "include_stop_str_in_output": True}, "hel", "l"),
    ],
)
async def test_what_ended_the_output(path: str, body: dict[str, Any], text: str, reason: str | int | None) -> None:
    (choice,) = (await post(path, body))["choices"]
    assert (text_of(choice), choice["stop_reason"]) == (text, reason)


@BOTH
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"spaces_between_special_tokens": True}, "hi"),
        ({"skip_special_tokens": False}, "h<start><start>i<start>"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "h<start><start>i<start>"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": True}, "h<start> <start>i<start>"),
    ],
)
async def test_spaces_separate_special_tokens_in_a_row(path: str, body: dict[str, Any], text: str) -> None:
    engine = FakeEngine()
    engine.output_tokens = lambda *_: [*b"h", START, START, *b"i", START, END]  # type: ignore[method-assign]
    (choice,) = (await post(path, body, engine))["choices"]
    assert text_of(choice) == text
    parts = [choice for chunk in await chunks_of(path, body, engine) for choice in chunk["choices"]]
    assert "".join(part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts) == text


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"truncate_prompt_tokens": 4}, "ghij"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, "abcd"),
        ({"truncate_prompt_tokens": 20}, "abcdefghij"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 15}, "fghij"),
        ({"truncate_prompt_tokens": -1, "truncation_side": "right", "max_tokens": 15}, "abcde"),
    ],
)
async def test_prompt_is_truncated(body: dict[str, Any], prompt: str) -> None:
    model = fake_model(max_model_len=20)
    for given in ("abcdefghij", [*b"abcdefghij"]):
        request = await engine_request(COMPLETIONS, {"prompt": given, "max_tokens": 2} | body, model=model)
        assert bytes(request.prompt).decode() == prompt
    rendered = "[u]abcd[a]"
    model = plain_model(max_model_len=20)
    messages = [{"role": "user", "content": "abcd"}]
    request = await engine_request(CHAT, {"messages": messages, "max_tokens": 2} | body, model=model)
    places = ["abcdefghij".index(letter) for letter in prompt]
    assert bytes(request.prompt).decode() == "".join(rendered[place] for place in places)


async def test_truncated_text_may_be_longer_than_the_context() -> None:
    body = {"prompt": "ab" * 100_000 + "c", "truncate_prompt_tokens": 3, "echo": True}
    assert (await post(COMPLETIONS, body, FakeEngine("x")))["choices"][0]["text"] == "abcx"


async def test_special_tokens_of_the_tokenizer_are_added_on_request() -> None:
    class WithStart(type(fake_model().tokenizer)):  # type: ignore[misc]
        def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
            return [START] * add_special + super().encode(text)

    model = plain_model(tokenizer=WithStart())
    for body, expected in (({}, [START, *b"hi"]), ({"add_special_tokens": False}, [*b"hi"])):
        assert (await engine_request(COMPLETIONS, body, model=model)).prompt == expected
    for body, expected in (({}, [*b"[u]hi[a]"]), ({"add_special_tokens": True}, [START, *b"[u]hi[a]"])):
        assert (await engine_request(CHAT, body, model=model)).prompt == expected


@BOTH
async def test_priority_reaches_the_engine(path: str) -> None:
    assert (await engine_request(path, {"priority": -3})).priority == -3
    assert (await engine_request(path, {})).priority == 0


@BOTH
async def test_request_id_is_part_of_the_response_id_and_not_of_the_engine(path: str) -> None:
    engine = FakeEngine("x")
    prefix = "chatcmpl-" if path == CHAT else "cmpl-"
    for _ in range(2):
        assert (await post(path, {"request_id": "my.id:1"}, engine))["id"] == f"{prefix}my.id:1"
    chunks = await chunks_of(path, {"request_id": "my.id:1"}, engine)
    assert {chunk["id"] for chunk in chunks} == {f"{prefix}my.id:1"}
    assert len({request.id for request in engine.requests}) == 3


@BOTH
async def test_token_ids_are_returned_with_the_text_of_their_chunk(path: str) -> None:
    body = {"return_token_ids": True, "n": 2}
    prompt = [*b"[u]hi[a]"] if path == CHAT else [*b"hi"]
    whole = await post(path, body)
    for choice in whole["choices"]:
        assert choice["token_ids"] == [*b"hello", END]
        assert (whole if path == CHAT else choice)["prompt_token_ids"] == prompt
    chunks = await chunks_of(path, body)
    parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == 1]
    texts = [part["text"] if "text" in part else part["delta"].get("content", "") for part in parts]
    shown = [(text, part.get("token_ids", [])) for text, part in zip(texts, parts, strict=True)]
    assert [each for each in shown if each[1]] == [*((chr(byte), [byte]) for byte in b"hello"), ("", [END])]
    if path == CHAT:
        assert [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk] == [prompt]
        assert "prompt_token_ids" in chunks[0]
    else:
        assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [prompt]
        assert "prompt_token_ids" in parts[0]


@BOTH
async def test_token_ids_are_absent_unless_requested(path: str) -> None:
    text = (await send(path, {})).text + (await send(path, {"stream": True})).text
    assert "token_ids" not in text
    assert "prompt_" not in text.replace("prompt_tokens", "")


@BOTH
async def test_prompt_logprobs_are_returned_by_token_id(path: str) -> None:
    body = await post(path, {"prompt_logprobs": 2, "n": 2})
    prompt = "[u]hi[a]" if path == CHAT else "hi"
    for place in [body] if path == CHAT else body["choices"]:
        first, *rest = place["prompt_logprobs"]
        assert first is None
        assert [next(iter(each)) for each in rest] == [str(byte) for byte in prompt.encode()[1:]]
        last = rest[-1]
        token = prompt.encode()[-1]
        assert last[str(token)]["decoded_token"] == prompt[-1]
        assert last[str(token)]["logprob"] == -token / 64
        assert last[str(token + 1)] == {"logprob": -token / 64 - 1, "rank": 2, "decoded_token": chr(token + 1)}
        assert len(last) == 2
    chunks = await chunks_of(path, {"prompt_logprobs": 2})
    place = chunks[0] if path == CHAT else chunks[0]["choices"][0]
    assert place["prompt_logprobs"] == (body if path == CHAT else body["choices"][0])["prompt_logprobs"]
    assert sum("prompt_logprobs" in str(chunk) for chunk in chunks) == 1


async def test_prompt_logprobs_and_echoed_logprobs_have_their_own_counts() -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 3, "prompt_logprobs": 1, "max_tokens": 0}
    engine = FakeEngine("")
    (choice,) = (await post(COMPLETIONS, body, engine))["choices"]
    assert engine.requests[0].prompt_logprobs == 3
    assert [each and len(each) for each in choice["prompt_logprobs"]] == [None, 1, 1]
    assert [each and len(each) for each in choice["logprobs"]["top_logprobs"]] == [None, 3, 3]
    scored = await post(COMPLETIONS, {"prompt": "abc", "prompt_logprobs": 0, "max_tokens": 0}, FakeEngine(""))
    assert scored["choices"][0]["text"] == ""
    assert len(scored["choices"][0]["prompt_logprobs"]) == 3


async def test_tokens_are_written_as_token_ids() -> None:
    body = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    (choice,) = (await post(COMPLETIONS, body | {"logprobs": 2}))["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:104"]
    assert set(choice["logprobs"]["top_logprobs"][0]) == {"token_id:104", "token_id:105"}
    (choice,) = (await post(CHAT, body | {"logprobs": True, "top_logprobs": 2}))["choices"]
    (token,) = choice["logprobs"]["content"]
    assert (token["token"], token["bytes"]) == ("token_id:104", [104])
    assert [each["token"] for each in token["top_logprobs"]] == ["token_id:104", "token_id:105"]


@BOTH
async def test_logprob_tokens_reach_the_engine(path: str) -> None:
    body = {"logprob_token_ids": [3, 9], "logprobs": True if path == CHAT else 0}
    assert (await engine_request(path, body)).logprob_tokens == (3, 9)


async def test_prompt_text_and_offsets_are_those_of_the_rendered_prompt() -> None:
    body = {"messages": [{"role": "user", "content": "é<"}], "return_prompt_text": True, "return_token_offsets": True}
    whole = await post(CHAT, body)
    assert whole["prompt_text"] == "[u]é<[a]"
    assert whole["prompt_token_offsets"][2:6] == [[2, 3], [3, 4], [3, 4], [4, 5]]
    chunks = await chunks_of(CHAT, body)
    assert [chunk.get("prompt_text") for chunk in chunks[:2]] == ["[u]é<[a]", None]
    body = {"prompt": ["é", "ab"], "return_token_offsets": True}
    first, second = (await post(COMPLETIONS, body))["choices"]
    assert (first["prompt_token_offsets"], second["prompt_token_offsets"]) == ([[0, 1], [0, 1]], [[0, 1], [1, 2]])
    (choice,) = (await post(COMPLETIONS, {"prompt": [97], "return_token_offsets": True}))["choices"]
    assert choice["prompt_token_offsets"] is None


def test_token_offsets_skip_tokens_before_the_text() -> None:
    model = fake_model()
    assert token_offsets([START, *b"ab"], "ab", model) == [(0, 0), (0, 1), (1, 2)]
    assert token_offsets([*b"ab"], "ac", model) is None


@BOTH
async def test_continuous_usage_counts_the_tokens_so_far(path: str) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, last = await chunks_of(path, options | {"n": 2})
    prompt = 8 if path == CHAT else 2
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {prompt}
    assert all(chunk["usage"]["total_tokens"] == prompt + count for chunk, count in zip(chunks, counts, strict=True))
    alone = await send(path, {"stream": True, "stream_options": {"continuous_usage_stats": True}})
    assert alone.headers["x-syringa-ignored"] == "stream_options.continuous_usage_stats"
    assert "completion_tokens" not in alone.text


@BOTH
async def test_usage_is_always_in_streams_if_the_server_says_so(path: str) -> None:
    config = Config(always_include_usage=True)
    for body in ({}, {"stream_options": {"include_usage": False}}):
        *chunks, last = await chunks_of(path, body, config=config)
        assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
        assert all(chunk["usage"] is None for chunk in chunks)
    assert (await post(path, {}, config=config))["usage"]["completion_tokens"] == 6


@BOTH
async def test_empty_model_name_is_the_default_model(path: str) -> None:
    assert (await post(path, {"model": ""}))["model"] == "fake"


async def test_reasoning_is_left_out_on_request() -> None:
    engine = FakeEngine("<think>hm</think>\nyes")
    body = {"include_reasoning": False, "return_token_ids": True}
    whole = await post(CHAT, body, engine, model=reasoning_model())
    assert "reasoning" not in whole["choices"][0]["message"]
    assert whole["choices"][0]["message"]["content"] == "yes"
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = await chunks_of(CHAT, body, engine, model=reasoning_model())
    assert not any("reasoning" in choice["delta"] for chunk in chunks for choice in chunk["choices"])
    ids = [id_ for chunk in chunks for choice in chunk["choices"] for id_ in choice.get("token_ids", [])]
    assert ids == whole["choices"][0]["token_ids"]
    kept = await post(CHAT, {"include_reasoning": True}, engine, model=reasoning_model())
    assert kept["choices"][0]["message"]["reasoning"] == "hm"


async def test_negative_thinking_budget_is_none() -> None:
    model = reasoning_model(OPENING)
    limited = await engine_request(CHAT, {"thinking_token_budget": 9}, model=model)
    assert limited.sampling.grammar is not None
    unlimited = await engine_request(CHAT, {"thinking_token_budget": -1}, model=model)
    assert unlimited.sampling.grammar is None


@pytest.mark.parametrize(
    ("content", "text"),
    [("Once", "Once"), ([{"type": "text", "text": "On"}, {"type": "text", "text": "ce"}], "On\nce")],
)
async def test_chat_echoes_the_assistant_message_that_it_continues(content: Any, text: str) -> None:
    messages = [*HI, {"role": "assistant", "content": content}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    engine = FakeEngine(" upon")
    assert (await post(CHAT, body, engine))["choices"][0]["message"]["content"] == f"{text} upon"
    assert bytes(engine.requests[0].prompt).decode().endswith(text)
    chunks = await chunks_of(CHAT, body, engine)
    contents = [choice["delta"].get("content") for chunk in chunks for choice in chunk["choices"]]
    assert contents[:3] == ["", text, " "]
    assert (await post(CHAT, {"echo": True}))["choices"][0]["message"]["content"] == "hello"


async def test_documents_are_passed_to_a_template_that_reads_them() -> None:
    body = {"documents": [{"title": "T", "text": "x"}]}
    request = await engine_request(CHAT, body, model=plain_model(DOCUMENTS))
    assert bytes(request.prompt).decode() == "<T: x>[user]hi"
    answer = await send(CHAT, body)
    assert (answer.status_code, answer.headers["x-syringa-ignored"]) == (200, "documents")
    assert (await refused(CHAT, {"documents": ["x"]}))["param"] == "documents[0]"


async def test_roles_of_the_template_are_accepted() -> None:
    messages = [{"role": "critic", "content": "Hm"}, *HI]
    for source in (SPEAKERS, KNOWN_ROLES):
        request = await engine_request(CHAT, {"messages": messages}, model=plain_model(source))
        assert bytes(request.prompt).decode() == "[critic]Hm[user]hi"
    for role in ("poet", "function", "x y", ""):
        error = await refused(CHAT, {"messages": [{"role": role, "content": "x"}]}, model=plain_model(KNOWN_ROLES))
        assert error["param"] == "messages[0].role"
