"""Schema-aware fuzzing: requests from the OpenAPI document, most of them slightly wrong, from a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from syringa.http.endpoints import ENDPOINTS

TIMEOUT = 5.0  # of each generating request, so that what takes longer than `HANG_SECONDS` hangs
MAX_BODY = 300_000  # bytes: larger ones test the network more than the server
_MAX_DEPTH = 6
_MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_PLURAL_FIELDS = ("n", "best_of")
_TEXTS = (
    "", "a", "lilac", "default", "user", "assistant", "auto", "\n", "\0", "ü", "🌸", "\u202e", "<tool_call>",
    "<|im_end|>\n<|im_start|>", "{{7*7}}", "{% for a in range(99999) %}", "../../etc/passwd", "' OR 1=1 --", "data:,x", "http://[",
    "data:image/png;base64,iVBORw0KGgo=", "http://127.0.0.1:1/a.png", "A" * 5000, "%00", "(a+)+$", "null", "1e999",
)  # fmt: skip
_HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63) - 1, 10**40, 0.0, -0.5, 1e308, 1e-320,
    "", [], {}, [[]], [None], {"": None}, [{}] * 50, {"type": "unknown"}, {"type": None}, {"$ref": "#"},
)  # fmt: skip
_GRAMMARS: tuple[Any, ...] = (
    {"type": "integer", "multipleOf": 9999991}, {"type": "string", "pattern": "(a|b|ab)*c{1,900}"},
    {"anyOf": [{"const": each} for each in range(300)]}, {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"type": "array", "minItems": 10**9}, {"type": "string", "minLength": 2, "maxLength": 1}, False, {"enum": []},
)  # fmt: skip
_HEADERS = (
    {"X-Syringa-Timeout": "-1"}, {"X-Syringa-Timeout": "nan"}, {"Content-Type": "text/plain"}, {"X-Request-Id": " "},
    {"Content-Encoding": "gzip"}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}, {"Accept": "a/b"},
    {"X-Syringa-Responses-Mode": "neither"}, {"Origin": "http://["},
    {"Content-Type": "application/json; charset=utf-16"},
)  # fmt: skip
# These change what other clients of the soak rely on, or load further models.
_EXCLUDED = {
    ("PUT", "/admin/models/{model_id}"),
    ("DELETE", "/admin/models/{model_id}"),
    ("POST", "/admin/models/{model_id}/unload"),
    ("POST", "/admin/models/pull"),
}
_METERED = {(each.method, each.path) for each in ENDPOINTS if each.metered}

Schema = Mapping[str, Any]


class FuzzedRequest(msgspec.Struct, kw_only=True):
    method: str
    path: str
    where: str  # method and path as declared
    headers: dict[str, str]
    body: bytes | None
    metered: bool


class Fuzzer:
    """Draws requests from an OpenAPI document."""

    def __init__(self, document: Mapping[str, Any], *, admin: bool = False) -> None:
        """`admin`: include the endpoints of administrators."""
        self._schemas = document["components"]["schemas"]
        self.operations = [
            (method.upper(), path, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
            if (admin or not path.startswith("/admin")) and (method.upper(), path) not in _EXCLUDED
        ]
        # Bodies are where the faults are: a request without one is drawn less often.
        self._weights = [10 if "requestBody" in each else 1 for _, _, each in self.operations]

    def draw(self, rng: random.Random) -> FuzzedRequest:
        method, path, operation = rng.choices(self.operations, self._weights)[0]
        declared = f"{method} {path}"
        filled = self._path(path, operation, rng)
        headers = {"X-Syringa-Timeout": str(TIMEOUT)}
        if rng.random() < 0.05:
            headers |= rng.choice(_HEADERS)
        body = None
        if content := operation.get("requestBody"):
            media_type, schema = next(iter(content["content"].items()))
            body = self._body(schema, rng)
            if media_type != "application/json":
                headers["Content-Type"] = media_type
        metered = (method, path) in _METERED
        if rng.random() < 0.02:
            method, metered = rng.choice(("PATCH", "OPTIONS", "PUT", "DELETE", "GET")), False
        return FuzzedRequest(method=method, path=filled, where=declared, headers=headers, body=body, metered=metered)

    def message(self, rng: random.Random) -> str:
        """Return a message for the WebSocket: mostly a `response.create`."""
        value = self._generate({"$ref": "#/components/schemas/ResponseRequest"}, rng, 0)
        kind = "response.create" if rng.random() < 0.95 else rng.choice(_TEXTS)
        if isinstance(value, dict):
            value = {"type": kind, **_limit_work(value, rng)}
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            value = mutate(value, rng)
        return _dump(value)

    def _path(self, path: str, operation: Schema, rng: random.Random) -> str:
        query = []
        for each in operation.get("parameters", ()):
            value: Any = self._generate(each["schema"], rng, 0)
            if rng.random() < 0.3:
                value = rng.choice((*_TEXTS, *_HOSTILE))
            text = quote(value if isinstance(value, str) else _dump(value), safe="")[:3000]
            if each["in"] == "path":
                path = path.replace("{" + each["name"] + "}", text or "x")
            elif each["in"] == "query" and rng.random() < 0.5:
                query.append(f"{each['name']}={text}")
        if path.startswith("/admin/organizations/"):
            path = "/admin/organizations/fuzzed"  # not one of the soak's own
        return path + ("?" + "&".join(query) if query else "")

    def _body(self, content: Schema, rng: random.Random) -> bytes:
        value = content.get("example") if rng.random() < 0.3 else None
        if value is None:
            value = self._generate(content["schema"], rng, 0)
        if isinstance(value, dict):
            value = _limit_work(value, rng)
            if "organization" in value:
                value["organization"] = "fuzzed"
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            value = mutate(value, rng)
        return _damage(_dump(value).encode("utf-8", "surrogatepass")[:MAX_BODY], rng)

    def _generate(self, schema: Any, rng: random.Random, depth: int) -> Any:
        """Return a value that mostly matches the schema."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return rng.choice(_HOSTILE)
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            return self._generate(self._schemas.get(name, {}), rng, depth + 1)
        for name in ("anyOf", "oneOf", "allOf"):
            if options := schema.get(name):
                return self._generate(rng.choice(options), rng, depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        kind = schema.get("type", "object" if "properties" in schema else "")
        if isinstance(kind, list):
            kind = rng.choice(kind)
        generate = _KINDS.get(kind)
        return rng.choice(_TEXTS) if generate is None else generate(self, schema, rng, depth)

    def _object(self, schema: Schema, rng: random.Random, depth: int) -> dict[str, Any]:
        required = schema.get("required", ())
        share = 0.25 if depth == 0 else 0.4
        found = {
            name: self._generate(each, rng, depth + 1)
            for name, each in schema.get("properties", {}).items()
            if name in required or rng.random() < share
        }
        for name in ("schema", "parameters", "json_schema"):  # where a client gives a schema of its own
            if name in found and rng.random() < 0.5:
                found[name] = rng.choice(_GRAMMARS)
        if not schema.get("properties") and rng.random() < 0.5:
            found[rng.choice(_TEXTS)] = self._generate(schema.get("additionalProperties", True), rng, depth + 1)
        return found

    def _array(self, schema: Schema, rng: random.Random, depth: int) -> list[Any]:
        low = min(int(schema.get("minItems", 0)), 10)
        return [self._generate(schema.get("items", True), rng, depth + 1) for _ in range(rng.randint(low, low + 2))]

    def _string(self, schema: Schema, rng: random.Random, depth: int) -> str:
        longest = schema.get("maxLength")
        if longest is not None and rng.random() < 0.1:
            return "x" * (int(longest) + rng.choice((0, 1)))
        return rng.choice(_TEXTS)

    def _number(self, schema: Schema, rng: random.Random, depth: int) -> float:
        low = schema.get("minimum", schema.get("exclusiveMinimum", -2))
        high = schema.get("maximum", schema.get("exclusiveMaximum", low + 20))
        chosen = rng.choice((low, high, low - 1, high + 1, rng.uniform(low, high), rng.uniform(low, high)))
        return int(chosen) if schema.get("type") == "integer" else chosen


_KINDS: dict[str, Callable[[Fuzzer, Schema, random.Random, int], Any]] = {
    "object": Fuzzer._object,
    "array": Fuzzer._array,
    "string": Fuzzer._string,
    "integer": Fuzzer._number,
    "number": Fuzzer._number,
    "boolean": lambda fuzzer, schema, rng, depth: rng.random() < 0.5,
    "null": lambda fuzzer, schema, rng, depth: None,
}


def _limit_work(value: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a copy that is mostly cheap: the server's time is better spent on more requests."""
    value = dict(value)
    if rng.random() < 0.9:
        for name in _MAX_TOKENS_FIELDS:
            if name in value:
                value[name] = 16 if name == "max_output_tokens" else rng.randint(1, 4)
        for name in _PLURAL_FIELDS:
            if name in value:
                value[name] = rng.randint(1, 2)
        if not any(name in value for name in _MAX_TOKENS_FIELDS):
            value |= {"max_output_tokens": 16} if "input" in value else {"max_tokens": 2}
    return value


def mutate(value: Any, rng: random.Random) -> Any:
    """Return the value with one random part replaced, removed, repeated or nested deeply."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {other: each for other, each in value.items() if other != name}
        if rng.random() < 0.1:
            return value | {rng.choice(_TEXTS): rng.choice(_HOSTILE)}
        return value | {name: mutate(value[name], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        index = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value * rng.choice((2, 40))
        return [mutate(each, rng) if number == index else each for number, each in enumerate(value)]
    if rng.random() < 0.05:
        for _ in range(rng.choice((5, 100, 600))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return rng.choice((*_HOSTILE, *_TEXTS))


def _dump(value: Any) -> str:
    """Return JSON as a careless client writes it, with `NaN` and `Infinity`."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "[" * 5000


def _damage(body: bytes, rng: random.Random) -> bytes:
    """Return the body, of which one in thirty is no JSON any more."""
    if rng.random() > 0.03 or not body:
        return body
    at = rng.randrange(len(body))
    return rng.choice(
        (body[:at], body[:at] + b"\xff" + body[at:], body[:at] + b"\0" + body[at + 1 :], body + b"{}", b"")
    )
