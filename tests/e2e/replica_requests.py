"""Seeded requests of all kinds, and what of their answers must not depend on which replica computed them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx
from websockets.asyncio.client import connect

Outcome = dict[str, Any]
Run = Callable[["RequestClient", int], Any]

_WORDS = ("rivers", "bread", "trains", "clouds", "violins", "bridges", "whales", "mirrors", "deserts", "clocks")
_SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string"}, "year": {"type": "integer"}, "tags": {"type": "array",
                   "items": {"type": "string"}, "maxItems": 3}},
    "required": ["title", "year", "tags"],
    "additionalProperties": False,
}  # fmt: skip
_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string"}, "count": {"type": "integer"}},
            "required": ["word", "count"],
        },
    },
}


class RequestClient:
    """Runs requests against a server. `begun` has the streams of which output has arrived, `done` what has ended."""

    def __init__(self, http: httpx.AsyncClient, kinds: Sequence[Run] | None = None) -> None:
        """`kinds`: of the requests in turn; all by default."""
        self.http = http
        self._kinds = kinds or KINDS
        self.begun: set[int] = set()
        self.done: set[int] = set()

    async def run(self, number: int) -> Outcome:
        """Run request `number` of the sequence; its kind and content depend on the number alone."""
        kind = self._kinds[number % len(self._kinds)]
        outcome: Outcome = await kind(self, number)
        self.done.add(number)
        return outcome | {"kind": kind.__name__}

    async def events(self, number: int, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Run a streamed request and yield its events."""
        async with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in _lines(answer):
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event or event["error"] is None, event
                self.observe(number, event)
                yield event

    def observe(self, number: int, event: dict[str, Any]) -> None:
        """Note whether a request has begun with an event."""
        if _has_output(event):
            self.begun.add(number)

    async def chat(self, number: int, tokens: int = 48, **fields: Any) -> Outcome:
        """Run a streamed chat completion, and return its choices put together."""
        body = {
            "messages": [{"role": "user", "content": f"Write about {_subject(number)}."}],
            "max_tokens": tokens,
            "seed": number,
            "temperature": 0.8,
            "stream_options": {"include_usage": True},
        }
        choices: dict[int, Outcome] = {}
        usage = None
        async for event in self.events(number, "/v1/chat/completions", body | fields):
            usage = event.get("usage") or usage
            for part in event["choices"]:
                _add_chat_part(choices.setdefault(part["index"], _new_choice()), part)
        return {"choices": [choices[index] for index in sorted(choices)], "usage": _usage(usage)}


async def _lines(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the lines of a stream. `aiter_lines` also splits them at characters that models write inside of strings."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line


def _has_output(event: dict[str, Any]) -> bool:
    """Return whether an event brings output of the model, not only a role or an id."""
    if "type" in event:
        return bool(event["type"].endswith(".delta"))
    return any(part.get("text") or set(part.get("delta") or ()) - {"role"} for part in event["choices"])


def _new_choice() -> Outcome:
    return {"text": "", "reasoning": "", "calls": {}, "logprobs": [], "finish": None}


def _add_chat_part(choice: Outcome, part: dict[str, Any]) -> None:
    delta = part["delta"]
    choice["text"] += delta.get("content") or ""
    choice["reasoning"] += delta.get("reasoning_content") or ""
    for call in delta.get("tool_calls") or ():
        known = choice["calls"].setdefault(call["index"], {"name": "", "arguments": ""})
        for name in known:
            known[name] += call["function"].get(name) or ""
    choice["logprobs"] += (part.get("logprobs") or {}).get("content") or []
    choice["finish"] = part["finish_reason"] or choice["finish"]


def _usage(usage: dict[str, Any] | None) -> Sequence[int]:
    """Return prompt and output tokens. How many were cached depends on the replica."""
    assert usage is not None
    return [usage.get("prompt_tokens", usage.get("input_tokens", -1)), usage.get("completion_tokens",
            usage.get("output_tokens", -1))]  # fmt: skip


def _subject(number: int) -> str:
    """Return what a request is about. No two have the same content, which identifies a request after a crash."""
    return f"{_WORDS[number % len(_WORDS)]} and the number {number}"


async def plain(client: RequestClient, number: int) -> Outcome:
    return await client.chat(number, 80, frequency_penalty=0.4)


async def four_choices(client: RequestClient, number: int) -> Outcome:
    return await client.chat(number, 40, n=4, stop=["\n\n"])


async def schema(client: RequestClient, number: int) -> Outcome:
    form = {"type": "json_schema", "json_schema": {"name": "note", "schema": _SCHEMA, "strict": True}}
    return await client.chat(number, 80, response_format=form)


async def thinking(client: RequestClient, number: int) -> Outcome:
    """Run a request with reasoning that is ended by its budget, and every other one with a schema after it.

    Others have a minimum of tokens: what follows the reasoning is not empty then, whatever is drawn.
    """
    form = {"type": "json_schema", "json_schema": {"name": "note", "schema": _SCHEMA, "strict": True}}
    fields: dict[str, Any] = {"response_format": form} if number % 2 else {"min_tokens": 64}
    options = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 32}
    outcome = await client.chat(number, 96, **options, **fields)
    assert all(each["reasoning"] and each["text"] for each in outcome["choices"]), outcome
    return outcome


async def tools(client: RequestClient, number: int) -> Outcome:
    return await client.chat(number, 80, tools=[_TOOL], tool_choice="required")


async def logprobs(client: RequestClient, number: int) -> Outcome:
    return await client.chat(number, 40, logprobs=True, top_logprobs=3, dry_multiplier=0.8)


async def completion(client: RequestClient, number: int) -> Outcome:
    body = {
        "prompt": [f"The north has {_subject(number)}", f"A list of {_subject(number)}:"],
        "max_tokens": 40,
        "min_tokens": 10,
        "seed": number,
        "logprobs": 2,
        "stream_options": {"include_usage": True},
    }
    choices: dict[int, Outcome] = {}
    usage = None
    async for event in client.events(number, "/v1/completions", body):
        usage = event.get("usage") or usage
        for part in event["choices"]:
            choice = choices.setdefault(part["index"], _new_choice())
            choice["text"] += part["text"]
            found = part.get("logprobs") or {}
            tokens, values = found.get("tokens") or [], found.get("token_logprobs") or []
            choice["logprobs"] += [list(pair) for pair in zip(tokens, values, strict=True)]
            choice["finish"] = part["finish_reason"] or choice["finish"]
    return {"choices": [choices[index] for index in sorted(choices)], "usage": _usage(usage)}


def _response_body(number: int) -> dict[str, Any]:
    return {"input": f"Tell me about {_subject(number)}.", "max_output_tokens": 60, "seed": number, "temperature": 0.9}


def _response(response: dict[str, Any]) -> Outcome:
    assert response["status"] in ("completed", "incomplete"), response
    texts = [part["text"] for item in response["output"] for part in item.get("content", ())]
    return {"text": texts, "status": response["status"], "usage": _usage(response["usage"])}


async def response_stream(client: RequestClient, number: int) -> Outcome:
    pieces, last = [], {}
    async for event in client.events(number, "/v1/responses", _response_body(number) | {"store": False}):
        last = event
        if event["type"] == "response.output_text.delta":
            pieces.append(event["delta"])
    outcome = _response(last["response"])
    assert "".join(outcome["text"]) == "".join(pieces)
    return outcome


async def websocket(client: RequestClient, number: int) -> Outcome:
    url = str(client.http.base_url).replace("http", "ws").rstrip("/") + "/v1/responses"
    # No limit of the client: its event loop and the server may be busy for seconds.
    async with connect(url, proxy=None, open_timeout=None, ping_interval=None) as socket:
        await socket.send(json.dumps({"type": "response.create", "store": False, **_response_body(number)}))
        while True:
            event = json.loads(await socket.recv())
            assert event["type"] not in ("error", "response.failed"), event
            client.observe(number, event)
            if event["type"] in ("response.completed", "response.incomplete"):
                return _response(event["response"])


async def background(client: RequestClient, number: int) -> Outcome:
    body = _response_body(number) | {"background": True, "store": True}
    made = (await client.http.post("/v1/responses", json=body)).raise_for_status().json()
    while True:
        found = (await client.http.get(f"/v1/responses/{made['id']}")).raise_for_status().json()
        if found["status"] not in ("queued", "in_progress"):
            return _response(found)
        await asyncio.sleep(0.1)


async def body_without_stream(client: RequestClient, number: int) -> Outcome:
    """Run a request with `best_of`, of which the likeliest choices are returned."""
    body = {"prompt": f"My favorites are {_subject(number)}", "max_tokens": 24, "seed": number, "n": 2, "best_of": 3}
    found = (await client.http.post("/v1/completions", json=body)).raise_for_status().json()
    choices = [{"text": each["text"], "finish": each["finish_reason"]} for each in found["choices"]]
    return {"choices": choices, "usage": _usage(found["usage"])}


KINDS: tuple[Run, ...] = (
    plain,
    four_choices,
    schema,
    thinking,
    tools,
    logprobs,
    completion,
    response_stream,
    websocket,
    background,
    body_without_stream,
)
