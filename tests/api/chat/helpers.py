"""Helpers of the chat tests: sending requests, and joining the chunks of a stream with every chunk validated."""

from __future__ import annotations

from typing import Any

import httpx

from tests.chat_models import plain_model
from tests.client import client, events
from tests.fake_engine import FakeEngine
from tests.schemas import validate_openai

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


async def send(
    body: dict[str, Any], engine: FakeEngine | None = None, path: str = PATH, **kwargs: Any
) -> httpx.Response:
    kwargs.setdefault("model", plain_model())
    async with client(engine or FakeEngine("hello"), **kwargs) as http:
        return await http.post(path, json={"messages": HI} | body)


async def post(body: dict[str, Any], engine: FakeEngine | None = None, **kwargs: Any) -> dict[str, Any]:
    """Send a request and return its body, joined from the chunks if streamed. Validated against OpenAI's schema."""
    answer = await send(body, engine, **kwargs)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        return reassemble(events(answer.text), logprobs=bool(body.get("logprobs")))
    validate_openai(answer.json(), "CreateChatCompletionResponse")
    return answer.json()


async def refused(body: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Send a request that has to be refused and return the error."""
    engine = FakeEngine("x")
    answer = await send(body, engine, **kwargs)
    assert answer.status_code == 400, answer.text
    assert not engine.requests
    return answer.json()["error"]


async def prompt_of(body: dict[str, Any], **kwargs: Any) -> str:
    """Return the text of the prompt that the engine gets for a request."""
    engine = FakeEngine("x")
    await post(body, engine, **kwargs)
    return bytes(engine.requests[0].prompt).decode()


def reassemble(seen: list[Any], *, logprobs: bool = False) -> dict[str, Any]:
    """Join chunks like a client. Requires `stream_options.include_usage`."""
    assert seen.pop() == "[DONE]"
    same = ("id", "created", "model", "system_fingerprint")
    whole = {name: seen[0][name] for name in same} | {"object": "chat.completion"}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in seen:
        validate_openai(chunk, "CreateChatCompletionStreamResponse")
        assert chunk["object"] == "chat.completion.chunk"
        assert {name: chunk[name] for name in same} == {name: whole[name] for name in same}
        prompt_fields = ("prompt_token_ids", "prompt_token_offsets", "prompt_logprobs", "prompt_text")
        whole |= {name: chunk[name] for name in prompt_fields if name in chunk}
        for part in chunk["choices"]:
            if part["index"] not in choices:
                assert part["delta"]["role"] == "assistant"
                assert part["delta"].get("content") in ("" if part["delta"].keys() == {"role", "content"} else None,)
                choices[part["index"]] = _new_choice(part["index"], logprobs)
            _add(choices[part["index"]], part)
        if chunk["choices"]:
            assert chunk["usage"] is None
        else:
            assert chunk is seen[-1]
            whole["usage"] = chunk["usage"]
    for choice in choices.values():
        if choice["message"]["tool_calls"] and not choice["message"]["content"]:
            choice["message"]["content"] = None
    return whole | {"choices": [choices[index] for index in sorted(choices)]}


def _new_choice(index: int, logprobs: bool) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", "refusal": None, "annotations": [], "tool_calls": []}
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": [], "refusal": None} if logprobs else None,
        "finish_reason": None,
        "stop_reason": None,
    }


def _add(choice: dict[str, Any], part: dict[str, Any]) -> None:
    assert choice["finish_reason"] is None
    message, delta = choice["message"], part["delta"]
    message["content"] += delta.get("content") or ""
    for name in ("reasoning", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            assert call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(call)
        else:
            assert call["function"].keys() == {"arguments"}
            message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if part["logprobs"] is not None:
        choice["logprobs"]["content"] += part["logprobs"]["content"]
    choice["finish_reason"] = part["finish_reason"]
    choice["stop_reason"] = part.get("stop_reason")
    if "token_ids" in part:
        choice["token_ids"] = choice.get("token_ids", []) + part["token_ids"]
    if part["finish_reason"] is not None:
        assert delta == {}
