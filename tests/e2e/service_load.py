"""Concurrent clients: the requests they send, the responses they see, and a comparison with the usage records."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import ssl
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import httpx
import msgspec

from syringa.store import UsageRecord
from tests.e2e.service import Key

Fate = Literal["ok", "left", "refused", "failed", "broken"]

COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
METERED = (COMPLETIONS, CHAT, RESPONSES)
LATE = 10.0  # seconds that a loaded machine may take to notice that a process was killed, or to write a record
_DONE = ("[DONE]", "response.completed", "response.incomplete")
# Invalid requests, each for another reason.
_BROKEN: tuple[tuple[str, bytes, dict[str, str]], ...] = (
    (COMPLETIONS, b'{"prompt": "x"', {}),
    (COMPLETIONS, b"[1, 2]", {}),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": "many"}', {}),
    (COMPLETIONS, b'{"prompt": "x", "temperature": 9, "stream": true}', {}),
    (COMPLETIONS, b'{"prompt": "x", "model": "unknown"}', {}),
    (COMPLETIONS, b'{"prompt": "x"}', {"content-type": "text/plain"}),
    (COMPLETIONS, b'{"prompt": "x"}', {"x-syringa-timeout": "soon"}),
    (CHAT, b'{"messages": []}', {}),
    (CHAT, b"\xff\xfe", {}),
    (CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", {}),
    (RESPONSES, b'{"input": "x", "previous_response_id": "resp_unknown"}', {}),
    (RESPONSES, b"", {}),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `leaves`: the client disconnects after so many seconds, or with 0 once the response has begun."""

    key: Key
    path: str
    body: bytes
    headers: dict[str, str] = {}
    leaves: float | None = None
    user: str | None = None


class Seen(msgspec.Struct, kw_only=True):
    """The result of a request, as seen by its client."""

    id: str
    plan: Plan
    began: float
    ended: float = 0.0
    fate: Fate = "broken"
    status: int = 0
    tokens: tuple[int, int, int] = (0, 0, 0)  # input, cached, output
    retry_after: float = 0.0
    message: str = ""


class Mix:
    """Random requests from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def plain(self, key: Key, most: int = 6, stream: bool | None = None) -> Plan:
        """Return a valid request."""
        (path,) = self._random.choices(METERED, (5, 5, 2))  # a response has at least 16 tokens
        number = next(self._numbers)
        stream = self._random.random() < 0.5 if stream is None else stream
        text, user = f"Number {number} is", f"user-{number % 7}" if number % 2 else None
        body: dict[str, Any] = {"stream": stream, "ignore_eos": True, "user": user}
        tokens = self._random.randint(4, most)
        if path == COMPLETIONS:
            body |= {"prompt": text, "max_tokens": tokens}
        elif path == CHAT:
            body |= {"messages": [{"role": "user", "content": text}], "max_completion_tokens": tokens}
        else:
            body |= {"input": text, "max_output_tokens": 16, "store": bool(number % 3)}
        if stream and path != RESPONSES:
            body["stream_options"] = {"include_usage": True}
        return Plan(key=key, path=path, body=json.dumps(body).encode(), user=user)

    def any(self, keys: Sequence[Key]) -> Plan:
        """Return a valid request (70%), one whose client disconnects (18%), one that times out (2%), or an invalid."""
        key = self._random.choice(keys)
        drawn = self._random.random()
        if drawn < 0.70:
            return self.plain(key)
        if drawn < 0.80:
            return msgspec.structs.replace(self.plain(key, 16, stream=True), leaves=0.0)
        if drawn < 0.88:
            return msgspec.structs.replace(self.plain(key, 16), leaves=self._random.uniform(0.001, 0.5))
        if drawn < 0.90:
            return msgspec.structs.replace(self.plain(key, 16), headers={"x-syringa-timeout": "0.05"})
        path, body, headers = self._random.choice(_BROKEN)
        return Plan(key=key, path=path, body=body, headers=headers)


class Load:
    """Clients with one connection each, and the results of all requests."""

    def __init__(self, url: str, watch: Callable[[int], None] = lambda count: None) -> None:
        """`watch` is called with the number of completed requests after each of them."""
        self.seen: list[Seen] = []
        self._url, self._watch = url, watch
        self._port = int(url.rpartition(":")[2])
        self._trust = ssl.create_default_context()  # creating one per client would take longer than its requests

    async def client(self, plans: Iterable[Plan], pause: Callable[[], float] = lambda: 0.0) -> None:
        """Send requests one after another. `pause` returns the seconds to wait after a refusal."""
        async with httpx.AsyncClient(base_url=self._url, timeout=300, verify=self._trust) as http:
            for plan in plans:
                seen = Seen(id=uuid.uuid4().hex, plan=plan, began=time.time())
                try:
                    await (self._send_and_disconnect(plan, seen) if plan.leaves else self._ask(http, plan, seen))
                except httpx.TransportError as error:
                    seen.message = repr(error)
                seen.ended = time.time()
                self.seen.append(seen)
                self._watch(len(self.seen))
                if seen.fate in ("refused", "broken"):
                    await asyncio.sleep(pause())

    async def _ask(self, http: httpx.AsyncClient, plan: Plan, seen: Seen) -> None:
        headers = {"content-type": "application/json", **_headers(plan, seen)}
        async with http.stream("POST", plan.path, content=plan.body, headers=headers) as answer:
            seen.status = answer.status_code
            seen.retry_after = float(answer.headers.get("retry-after", 0))
            if plan.leaves is not None and seen.status == 200:
                await anext(answer.aiter_lines(), None)
                seen.fate = "left"
                return
            await answer.aread()
            _parse_response(seen, answer.text)

    async def _send_and_disconnect(self, plan: Plan, seen: Seen) -> None:
        """Send a complete request on a raw connection, and disconnect without reading the response."""
        _, writer = await asyncio.open_connection("127.0.0.1", self._port)
        lines = [f"POST {plan.path} HTTP/1.1", "host: a", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in _headers(plan, seen).items()]
        lines += [f"content-length: {len(plan.body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + plan.body)
        await writer.drain()
        await asyncio.sleep(plan.leaves or 0)
        writer.close()
        seen.fate = "left"


def _headers(plan: Plan, seen: Seen) -> dict[str, str]:
    return {"authorization": plan.key.header, "x-request-id": seen.id, **plan.headers}


def _parse_response(seen: Seen, text: str) -> None:
    """Set the result of a request from its complete response."""
    if seen.status != 200:
        seen.fate = "refused" if seen.status < 500 else "failed"
        seen.message = json.loads(text)["error"]["message"]
        return
    if not text.startswith(("data:", "event:", ":")):
        seen.fate, seen.tokens = "ok", _tokens(json.loads(text))
        return
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    if errors := [
        error for each in events if (error := each.get("error") or (each.get("response") or {}).get("error"))
    ]:
        seen.fate, seen.message = "failed", errors[0]["message"]
    elif data[-1] in _DONE or events[-1].get("type") in _DONE:
        seen.fate, seen.tokens = "ok", _tokens(events[-1].get("response") or events[-1])


def _tokens(body: dict[str, Any]) -> tuple[int, int, int]:
    usage = body["usage"]
    names = ("prompt_tokens", "completion_tokens") if "prompt_tokens" in usage else ("input_tokens", "output_tokens")
    given, made = names
    details = usage.get(f"{given}_details") or {}
    return usage[given], details.get("cached_tokens", 0), usage[made]


def differences(
    seen: Iterable[Seen], rows: Sequence[UsageRecord], *, kills: Sequence[float] = (), failures: Sequence[float] = ()
) -> list[str]:
    """Return the differences between the results of clients and the usage records.

    `kills`: times at which an API process was killed: a request that it had not ended has no record. `failures`: times
    at which a model worker was killed.
    """
    metered = [each for each in seen if each.plan.path in METERED]
    single = [row for row in rows if row.outcome != "refused"]
    found = {row.request_id: row for row in single}
    problems = [
        f"{count} rows for {id}" for id, count in Counter(row.request_id for row in single).items() if count > 1
    ]
    unknown = found.keys() - {each.id for each in metered}
    problems += [f"no request for {found[id]}" for id in unknown]

    refusals: Counter[tuple[str, str, int]] = Counter()
    broken = sum(each.fate == "broken" for each in metered)  # refusals that were recorded but not sent
    for each in metered:
        if each.fate == "refused":
            refusals[each.plan.key.id, each.plan.path, each.status] += 1
            continue
        row = found.get(each.id)
        if row is None:
            # The server may not have noticed that the client had left.
            may_be_open = each.fate == "left" and any(kill - 1.0 - LATE <= each.ended <= kill + LATE for kill in kills)
            if each.fate != "broken" and not may_be_open:
                problems.append(f"no row for {each}")
        elif each.fate == "left" and row.outcome == "failed" and any(row.at < moment + LATE for moment in failures):
            continue
        elif fault := _fault(each, row):
            problems.append(f"{fault}: {each}, {row}")
    recorded: Counter[tuple[str, str, int]] = Counter()
    for row in rows:
        if row.outcome == "refused":
            recorded[row.key, row.endpoint, row.status] += row.requests
    for name in refusals | recorded:
        if not refusals[name] <= recorded[name] <= refusals[name] + broken:
            problems.append(f"{name}: {refusals[name]} refusals were seen, and {recorded[name]} are recorded")
    return problems


def _fault(seen: Seen, row: UsageRecord) -> str:
    if (row.key, row.endpoint) != (seen.plan.key.id, seen.plan.path):
        return "another key or endpoint"
    if seen.fate == "ok":
        if (row.outcome, row.status, row.requests, row.user) != ("ok", 200, 1, seen.plan.user):
            return "another outcome, status, count or user"
        if (row.input_tokens, row.cached_tokens, row.output_tokens) != seen.tokens:
            return "other token counts"
    if seen.fate == "left" and row.outcome not in ("cancelled", "ok"):
        return "the client disconnected"
    if seen.fate == "failed" and row.outcome != "failed":
        return "the request failed"
    return ""
