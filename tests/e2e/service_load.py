"""Many clients at once: what they ask, what they see of it, and whether the server's books say the same."""

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
LATE = 2.0  # seconds that a busy machine may take to notice that a process was killed, or to write a row
_DONE = ("[DONE]", "response.completed", "response.incomplete")
# Each is wrong in another way.
_BROKEN: tuple[tuple[str, bytes, dict[str, str]], ...] = (
    (COMPLETIONS, b'{"prompt": "x"', {}),
    (COMPLETIONS, b"[1, 2]", {}),
    (COMPLETIONS, b'{"prompt": "x", "max_tokens": "many"}', {}),
    (COMPLETIONS, b'{"prompt": "x", "temperature": 9, "stream": true}', {}),
    (COMPLETIONS, b'{"prompt": "x", "model": "nobody"}', {}),
    (COMPLETIONS, b'{"prompt": "x"}', {"content-type": "text/plain"}),
    (COMPLETIONS, b'{"prompt": "x"}', {"x-syringa-timeout": "soon"}),
    (CHAT, b'{"messages": []}', {}),
    (CHAT, b"\xff\xfe", {}),
    (CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", {}),
    (RESPONSES, b'{"input": "x", "previous_response_id": "resp_of_nobody"}', {}),
    (RESPONSES, b"", {}),
)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `leaves`: its client goes after so many seconds, without waiting for an answer, or with 0 as soon as
    the answer has begun."""

    key: Key
    path: str
    body: bytes
    headers: dict[str, str] = {}
    leaves: float | None = None
    user: str | None = None


class Seen(msgspec.Struct, kw_only=True):
    """What became of it, as far as its client knows."""

    id: str
    plan: Plan
    began: float
    ended: float = 0.0
    fate: Fate = "broken"
    status: int = 0
    tokens: tuple[int, int, int] = (0, 0, 0)  # input, cached, output
    retry_after: float = 0.0
    said: str = ""


class Mix:
    """What clients ask for, drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._numbers = itertools.count()

    def plain(self, key: Key, most: int = 6, stream: bool | None = None) -> Plan:
        """A request with nothing wrong about it."""
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
        """Of ten, seven are plain, one is left when its answer begins, one before, and one is wrong."""
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
    """Clients with a connection each, and everything that they have seen."""

    def __init__(self, url: str, watch: Callable[[int], None] = lambda count: None) -> None:
        """`watch` is called with how many requests have ended, each time that one has."""
        self.seen: list[Seen] = []
        self._url, self._watch = url, watch
        self._port = int(url.rpartition(":")[2])
        self._trust = ssl.create_default_context()  # a new one for each client would take longer than its requests

    async def client(self, plans: Iterable[Plan], pause: Callable[[], float] = lambda: 0.0) -> None:
        """One after the other. `pause`: seconds after a refusal."""
        async with httpx.AsyncClient(base_url=self._url, timeout=90, verify=self._trust) as http:
            for plan in plans:
                seen = Seen(id=uuid.uuid4().hex, plan=plan, began=time.time())
                try:
                    await (self._vanish(plan, seen) if plan.leaves else self._ask(http, plan, seen))
                except httpx.TransportError as error:
                    seen.said = repr(error)
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
            _judge(seen, answer.text)

    async def _vanish(self, plan: Plan, seen: Seen) -> None:
        """By hand, as the request has to be with the server, whole, before its client goes."""
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


def _judge(seen: Seen, text: str) -> None:
    """What an answer that came to its end says."""
    if seen.status != 200:
        seen.fate = "refused" if seen.status < 500 else "failed"
        seen.said = json.loads(text)["error"]["message"]
        return
    if not text.startswith(("data:", "event:", ":")):
        seen.fate, seen.tokens = "ok", _tokens(json.loads(text))
        return
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [json.loads(each) for each in data if each != "[DONE]"]
    if wrong := [error for each in events if (error := each.get("error") or (each.get("response") or {}).get("error"))]:
        seen.fate, seen.said = "failed", wrong[0]["message"]
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
    """Where what clients with a key saw and what the books say are not the same. `kills`: when an API process was
    killed, which may take the last second's rows with it. `failures`: when an engine was, under whoever waited."""
    metered = [each for each in seen if each.plan.path in METERED]
    single = [row for row in rows if row.outcome != "refused"]
    found = {row.request_id: row for row in single}
    wrong = [f"{count} rows for {id}" for id, count in Counter(row.request_id for row in single).items() if count > 1]
    unknown = found.keys() - {each.id for each in metered}
    wrong += [f"nobody asked for {found[id]}" for id in unknown]

    refusals: Counter[tuple[str, str, int]] = Counter()
    doubtful: Counter[tuple[str, str, int]] = Counter()
    for each in metered:
        may_be_lost = any(kill - 1.0 - LATE <= each.ended <= kill + LATE for kill in kills)
        if each.fate == "refused":
            name = (each.plan.key.id, each.plan.path, each.status)
            refusals[name] += 1
            doubtful[name] += may_be_lost
            continue
        row = found.get(each.id)
        if row is None:
            if each.fate != "broken" and not may_be_lost:
                wrong.append(f"no row for {each}")
        elif each.fate == "left" and row.outcome == "failed" and any(row.at < moment + LATE for moment in failures):
            continue
        elif fault := _fault(each, row):
            wrong.append(f"{fault}: {each}, {row}")
    booked: Counter[tuple[str, str, int]] = Counter()
    for row in rows:
        if row.outcome == "refused":
            booked[row.key, row.endpoint, row.status] += row.requests
    for name in refusals | booked:
        if not refusals[name] - doubtful[name] <= booked[name] <= refusals[name]:
            wrong.append(f"{name}: {refusals[name]} refusals were seen, and {booked[name]} are in the books")
    return wrong


def _fault(seen: Seen, row: UsageRecord) -> str:
    if (row.key, row.endpoint) != (seen.plan.key.id, seen.plan.path):
        return "another key or endpoint"
    if seen.fate == "ok":
        if (row.outcome, row.status, row.requests, row.user) != ("ok", 200, 1, seen.plan.user):
            return "not as it was answered"
        if (row.input_tokens, row.cached_tokens, row.output_tokens) != seen.tokens:
            return "other tokens"
    if seen.fate == "left" and row.outcome not in ("cancelled", "ok"):
        return "its client left"
    if seen.fate == "failed" and row.outcome != "failed":
        return "it failed"
    return ""
