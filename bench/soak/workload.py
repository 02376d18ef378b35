"""Valid requests for every endpoint of the server. An endpoint without a builder here is an error, not an omission."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from syringa.errors import StartupError
from syringa.http.endpoints import ENDPOINTS
from syringa.http.routing import WEBSOCKET, Access, Endpoint

WORDS = ("lilac", "river", "seven", "walk", "stone", "green", "quickly", "under", "letter", "Paris", "a", "the", "of")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"name": "look_up", "description": "Look a word up.", "parameters": SCHEMA}
_REMEMBERED = 200  # ids per kind and organization
_UNKNOWN = "unknown-0123456789"


class OrganizationState:
    """The ids of stored objects that the clients of one organization have seen."""

    def __init__(self) -> None:
        self.responses: deque[str] = deque(maxlen=_REMEMBERED)
        self.conversations: deque[str] = deque(maxlen=_REMEMBERED)
        self.items: deque[tuple[str, str]] = deque(maxlen=_REMEMBERED)  # (conversation, item)
        self.keys: deque[str] = deque(maxlen=_REMEMBERED)  # made by the soak to be revoked
        self.files: deque[str] = deque(maxlen=_REMEMBERED)
        self.batches: deque[str] = deque(maxlen=_REMEMBERED)


class SoakRequest(msgspec.Struct, kw_only=True):
    endpoint: Endpoint
    path: str
    body: dict[str, Any] | None = None

    @property
    def as_admin(self) -> bool:
        return self.endpoint.access is Access.ADMIN


class Draw:
    """The random choices of one client."""

    def __init__(self, rng: random.Random, state: OrganizationState, model: str, number: int) -> None:
        """`number`: of the client, so that it may use names of its own."""
        self.rng, self.state, self.model, self.number = rng, state, model, number

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def text(self, most: int = 30) -> str:
        return " ".join(self.rng.choices(WORDS, k=self.rng.randint(1, most)))

    def tokens(self) -> int:
        """Mostly short outputs, because two cores serve everything."""
        return self.rng.choices((self.rng.randint(1, 8), self.rng.randint(8, 32), 150), weights=(85, 12, 3))[0]

    def id_of(self, ids: Sequence[str]) -> str:
        return self.rng.choice(ids) if ids and not self.chance(0.05) else _UNKNOWN

    def item(self) -> tuple[str, str]:
        return self.rng.choice(self.state.items) if self.state.items else (_UNKNOWN, _UNKNOWN)


Builder = Callable[[Draw], tuple[str, dict[str, Any] | None]]  # the filled-in path, and the body


def _chat(draw: Draw) -> dict[str, Any]:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": draw.text()}],
        "max_tokens": draw.tokens(),
        "stream": draw.chance(0.6),
        "seed": draw.rng.randint(0, 5),
    }
    if draw.chance(0.1):
        body["n"] = 2
    if draw.chance(0.06):
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    if draw.chance(0.05):
        body |= {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "auto"}
    if draw.chance(0.1):
        body |= {"logprobs": True, "top_logprobs": 2}
    return body


def _completion(draw: Draw) -> dict[str, Any]:
    prompt: Any = [draw.text(), draw.text()] if draw.chance(0.1) else draw.text(120)
    body = {"prompt": prompt, "max_tokens": draw.tokens(), "stream": draw.chance(0.6)}
    return body | ({"stop": ["the", "\n"]} if draw.chance(0.2) else {})


def _embedding(draw: Draw) -> dict[str, Any]:
    texts = [draw.text(60) for _ in range(draw.rng.randint(1, 16))]
    return {"input": texts, "encoding_format": draw.rng.choice(("float", "base64"))}


def _rerank(draw: Draw) -> dict[str, Any]:
    return {"query": draw.text(), "documents": [draw.text(60) for _ in range(draw.rng.randint(1, 16))], "top_n": 3}


def _score(draw: Draw) -> dict[str, Any]:
    return {"text_1": draw.text(), "text_2": [draw.text(60) for _ in range(draw.rng.randint(1, 4))]}


def _anthropic_conversation(draw: Draw) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": draw.text()}], "system": draw.text(5)}
    if draw.chance(0.05):
        body["tools"] = [{"name": "look_up", "description": "Look a word up.", "input_schema": SCHEMA}]
    if draw.chance(0.2):
        body["cache_control"] = {"type": "ephemeral"}
    return body


def _anthropic_message(draw: Draw) -> dict[str, Any]:
    body = _anthropic_conversation(draw) | {"max_tokens": draw.tokens(), "stream": draw.chance(0.6)}
    return body | ({"stop_sequences": ["the"]} if draw.chance(0.2) else {})


def _ollama_options(draw: Draw) -> dict[str, Any]:
    options = {"num_predict": draw.tokens(), "seed": draw.rng.randint(0, 5)}
    return {"model": draw.model, "options": options, "stream": draw.chance(0.6)}


def _ollama_chat(draw: Draw) -> dict[str, Any]:
    body = _ollama_options(draw) | {"messages": [{"role": "user", "content": draw.text()}]}
    if draw.chance(0.06):
        body["format"] = SCHEMA
    if draw.chance(0.05):
        body["tools"] = [{"type": "function", "function": TOOL}]
    return body


def _ollama_generate(draw: Draw) -> dict[str, Any]:
    return _ollama_options(draw) | {"prompt": draw.text(60), "raw": draw.chance(0.2)}


def response_body(draw: Draw) -> dict[str, Any]:
    """Return the body of a response; also of a `response.create` over a WebSocket, without `stream`."""
    body: dict[str, Any] = {"input": draw.text(), "max_output_tokens": max(16, draw.tokens())}
    if draw.chance(0.3):
        body["store"] = False
    elif draw.chance(0.3) and draw.state.conversations:
        body["conversation"] = draw.id_of(draw.state.conversations)
    elif draw.chance(0.3) and draw.state.responses:
        body["previous_response_id"] = draw.id_of(draw.state.responses)
    return body


def _response(draw: Draw) -> dict[str, Any]:
    body = response_body(draw) | {"stream": draw.chance(0.6)}
    if "store" not in body and draw.chance(0.15):
        body["background"] = True
    return body


def _list_query(draw: Draw) -> str:
    return f"?limit={draw.rng.randint(1, 20)}&order={draw.rng.choice(('asc', 'desc'))}"


def _message(draw: Draw) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": draw.text()}


def _on(path: str, body: Callable[[Draw], dict[str, Any]] | None = None) -> Builder:
    """Return a builder for a path whose parameters are filled with ids that the organization has seen."""

    def build(draw: Draw) -> tuple[str, dict[str, Any] | None]:
        conversation, item = draw.item()
        filled = path.format(
            response_id=draw.id_of(draw.state.responses),
            conversation_id=conversation if "{item_id}" in path else draw.id_of(draw.state.conversations),
            item_id=item,
            key_id=draw.id_of(draw.state.keys),
            file_id=draw.id_of(draw.state.files),
            batch_id=draw.id_of(draw.state.batches),
            id=draw.model,
            organization_id="soak-spare",
            model_id=f"soak-{draw.number % 8}",
            query=_list_query(draw),
            window=draw.rng.choice(("5m", "1h")),
        )
        return filled, None if body is None else body(draw)

    return build


def _upload(draw: Draw) -> tuple[str, dict[str, Any] | None]:
    """Return the fields of a form: the input file of a small batch."""
    body = {"messages": [{"role": "user", "content": draw.text()}], "max_tokens": draw.tokens()}
    line = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = [msgspec.json.encode({"custom_id": str(number), **line}).decode() for number in range(3)]
    return "/v1/files", {"purpose": "batch", "file": "\n".join(lines)}


def _create_batch(draw: Draw) -> tuple[str, dict[str, Any] | None]:
    file = draw.id_of(draw.state.files)
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "1h"}
    return "/v1/batches", body


_CONVERSATION = "/v1/conversations/{conversation_id}"

# fmt: off
BUILDERS: dict[tuple[str, str], tuple[float, Builder]] = {  # with their weights
    ("POST", "/v1/chat/completions"): (20, _on("/v1/chat/completions", _chat)),
    ("POST", "/api/v2/chat/completions"): (4, _on("/api/v2/chat/completions", _chat)),
    ("POST", "/v1/completions"): (10, _on("/v1/completions", _completion)),
    ("POST", "/api/v2/completions"): (4, _on("/api/v2/completions", _completion)),
    ("POST", "/v1/embeddings"): (3, _on("/v1/embeddings", _embedding)),
    ("POST", "/api/v2/embeddings"): (1, _on("/api/v2/embeddings", _embedding)),
    ("POST", "/rerank"): (0.5, _on("/rerank", _rerank)),
    ("POST", "/v1/rerank"): (1, _on("/v1/rerank", _rerank)),
    ("POST", "/v2/rerank"): (0.5, _on("/v2/rerank", _rerank)),
    ("POST", "/score"): (0.5, _on("/score", _score)),
    ("POST", "/v1/score"): (1, _on("/v1/score", _score)),
    ("POST", "/v1/messages"): (8, _on("/v1/messages?beta=true", _anthropic_message)),
    ("POST", "/v1/messages/count_tokens"): (2, _on("/v1/messages/count_tokens", _anthropic_conversation)),
    ("POST", "/api/chat"): (4, _on("/api/chat", _ollama_chat)),
    ("POST", "/api/generate"): (4, _on("/api/generate", _ollama_generate)),
    ("POST", "/api/embed"): (1, _on("/api/embed", lambda d: {"model": "default", "input": [d.text(60), d.text(60)]})),
    ("POST", "/api/embeddings"): (0.5, _on("/api/embeddings", lambda d: {"model": "default", "prompt": d.text(60)})),
    ("GET", "/api/tags"): (0.5, _on("/api/tags")),
    ("GET", "/api/ps"): (0.5, _on("/api/ps")),
    ("POST", "/api/show"): (0.5, _on("/api/show", lambda d: {"model": d.model})),
    ("GET", "/api/version"): (0.5, _on("/api/version")),
    # Of no model that can be downloaded.
    ("POST", "/api/pull"): (0.2, _on("/api/pull", lambda d: {"model": "soak-none"})),
    ("POST", "/api/create"):
        (0.3, _on("/api/create", lambda d: {"model": f"soak-o{d.number % 4}", "from": d.model, "system": d.text(5)})),
    ("POST", "/api/copy"):
        (0.2, _on("/api/copy", lambda d: {"source": d.model, "destination": f"soak-o{d.number % 4}"})),
    ("DELETE", "/api/delete"): (0.3, _on("/api/delete", lambda d: {"model": f"soak-o{d.number % 4}"})),
    ("POST", "/api/push"): (0.1, _on("/api/push")),
    ("POST", "/api/blobs/{digest}"): (0.1, _on("/api/blobs/sha256:0")),
    ("HEAD", "/api/blobs/{digest}"): (0.1, _on("/api/blobs/sha256:0")),
    ("GET", "/v1/models"): (1, _on("/v1/models")),
    ("GET", "/api/v2/models"): (1, _on("/api/v2/models")),
    ("GET", "/v1/models/{id:path}"): (1, _on("/v1/models/{id}")),
    ("POST", "/tokenize"): (2, _on("/tokenize", lambda draw: {"prompt": draw.text()})),
    ("POST", "/detokenize"): (2, _on("/detokenize", lambda draw: {"tokens": [draw.rng.randint(0, 9999)] * 4})),
    ("GET", "/"): (0.5, _on("/")),
    ("GET", "/console"): (0.2, _on("/console")),
    ("GET", "/console/{path:path}"): (0.2, _on("/console/app.js")),
    ("GET", "/v1/me"): (0.5, _on("/v1/me")),
    ("GET", "/health"): (1, _on("/health")),
    ("GET", "/ready"): (1, _on("/ready")),
    ("GET", "/status"): (1, _on("/status?window={window}")),
    ("GET", "/metrics"): (1, _on("/metrics")),
    ("GET", "/openapi.json"): (0.2, _on("/openapi.json")),
    ("GET", "/docs"): (0.5, _on("/docs")),
    ("GET", "/version"): (0.5, _on("/version")),
    ("GET", "/ping"): (0.5, _on("/ping")),
    ("POST", "/ping"): (0.2, _on("/ping")),
    ("GET", "/load"): (0.5, _on("/load")),
    ("GET", "/tokenizer_info"): (0.5, _on("/tokenizer_info")),
    ("GET", "/props"): (0.5, _on("/props")),
    ("POST", "/v1/responses"): (20, _on("/v1/responses", _response)),
    (WEBSOCKET, "/v1/responses"): (6, _on("/v1/responses", response_body)),
    ("POST", "/v1/responses/input_tokens"): (2, _on("/v1/responses/input_tokens", lambda d: {"input": d.text()})),
    ("POST", "/v1/responses/compact"): (0.2, _on("/v1/responses/compact", lambda d: {"input": [_message(d)]})),
    ("GET", "/v1/responses"): (1, _on("/v1/responses{query}")),
    ("GET", "/v1/responses/{response_id}"): (4, _on("/v1/responses/{response_id}")),
    ("DELETE", "/v1/responses/{response_id}"): (1, _on("/v1/responses/{response_id}")),
    ("POST", "/v1/responses/{response_id}/cancel"): (1, _on("/v1/responses/{response_id}/cancel")),
    ("GET", "/v1/responses/{response_id}/input_items"): (2, _on("/v1/responses/{response_id}/input_items{query}")),
    ("POST", "/v1/conversations"): (2, _on("/v1/conversations", lambda d: {"items": [_message(d), _message(d)]})),
    ("GET", "/v1/conversations"): (1, _on("/v1/conversations{query}")),
    ("GET", "/v1/conversations/{conversation_id}"): (1, _on(_CONVERSATION)),
    ("POST", "/v1/conversations/{conversation_id}"): (1, _on(_CONVERSATION, lambda d: {"metadata": {"a": d.text(3)}})),
    ("DELETE", "/v1/conversations/{conversation_id}"): (0.3, _on(_CONVERSATION)),
    ("GET", "/v1/conversations/{conversation_id}/items"): (2, _on(_CONVERSATION + "/items{query}")),
    ("POST", "/v1/conversations/{conversation_id}/items"):
        (2, _on(_CONVERSATION + "/items", lambda d: {"items": [_message(d)]})),
    ("GET", "/v1/conversations/{conversation_id}/items/{item_id}"): (1, _on(_CONVERSATION + "/items/{item_id}")),
    ("DELETE", "/v1/conversations/{conversation_id}/items/{item_id}"): (0.3, _on(_CONVERSATION + "/items/{item_id}")),
    ("POST", "/v1/files"): (0.5, _upload),
    ("GET", "/v1/files"): (0.5, _on("/v1/files?limit=20&order=desc")),
    ("GET", "/v1/files/{file_id}"): (0.5, _on("/v1/files/{file_id}")),
    ("DELETE", "/v1/files/{file_id}"): (0.2, _on("/v1/files/{file_id}")),
    ("GET", "/v1/files/{file_id}/content"): (0.5, _on("/v1/files/{file_id}/content")),
    ("POST", "/v1/batches"): (0.3, _create_batch),
    ("GET", "/v1/batches"): (0.5, _on("/v1/batches?limit=20")),
    ("GET", "/v1/batches/{batch_id}"): (0.5, _on("/v1/batches/{batch_id}")),
    ("POST", "/v1/batches/{batch_id}/cancel"): (0.1, _on("/v1/batches/{batch_id}/cancel")),
    ("GET", "/admin/keys"): (0.5, _on("/admin/keys")),
    ("POST", "/admin/keys"): (0.5, _on("/admin/keys", lambda d: {"organization": "soak-spare", "name": d.text(2)})),
    ("GET", "/admin/keys/{key_id}"): (0.5, _on("/admin/keys/{key_id}")),
    ("DELETE", "/admin/keys/{key_id}"): (0.5, _on("/admin/keys/{key_id}")),
    ("GET", "/admin/organizations"): (0.5, _on("/admin/organizations")),
    ("GET", "/admin/organizations/{organization_id}"): (0.5, _on("/admin/organizations/{organization_id}")),
    ("PUT", "/admin/organizations/{organization_id}"):
        (0.5, _on("/admin/organizations/{organization_id}", lambda d: {"concurrent": d.rng.randint(0, 9)})),
    ("GET", "/admin/models"): (0.5, _on("/admin/models")),
    ("GET", "/admin/models/{model_id:path}"): (0.5, _on("/admin/models/{model_id}")),
    ("PUT", "/admin/models/{model_id:path}"): (0.3, _on("/admin/models/{model_id}", lambda d: {"path": "default"})),
    ("DELETE", "/admin/models/{model_id:path}"): (0.3, _on("/admin/models/{model_id}")),
    ("GET", "/admin/models/available"): (0.3, _on("/admin/models/available")),
    # Of no model that can be downloaded; and of no model that is there, because others wait for it.
    ("POST", "/admin/models/pull"): (0.2, _on("/admin/models/pull", lambda d: {"model": "soak-none"})),
    ("GET", "/admin/models/pulls"): (0.3, _on("/admin/models/pulls")),
    ("GET", "/admin/models/pulls/{pull_id}"): (0.2, _on("/admin/models/pulls/soak-none")),
    ("DELETE", "/admin/models/pulls/{pull_id}"): (0.1, _on("/admin/models/pulls/soak-none")),
    ("POST", "/admin/models/{model_id:path}/load"): (0.2, _on("/admin/models/soak-none/load")),
    ("POST", "/admin/models/{model_id:path}/unload"): (0.2, _on("/admin/models/soak-none/unload")),
    ("GET", "/admin/moves"): (0.3, _on("/admin/moves")),
    ("GET", "/admin/series"): (0.5, _on("/admin/series?range=1h")),
    ("GET", "/admin/replicas"): (0.5, _on("/admin/replicas")),
    # Of no replica: draining the only one of a model would leave nothing to measure.
    ("POST", "/admin/replicas/{replica_id}/drain"): (0.3, _on("/admin/replicas/soak-none/drain", lambda d: {})),
    ("GET", "/admin/nodes"): (0.3, _on("/admin/nodes")),
    ("POST", "/admin/nodes/{node}/drain"): (0.2, _on("/admin/nodes/soak-none/drain", lambda d: {})),
    ("GET", "/admin/pools"): (0.3, _on("/admin/pools")),
    ("POST", "/admin/pools/{pool}/open"): (0.1, _on("/admin/pools/soak-none/open")),
    ("POST", "/admin/pools/{pool}/close"): (0.1, _on("/admin/pools/soak-none/close")),
    ("POST", "/admin/pools/{pool}/reset"): (0.1, _on("/admin/pools/soak-none/reset")),
    ("GET", "/admin/usage"): (0.5, _on("/admin/usage?by=organization")),
    ("GET", "/v1/usage"): (1, _on("/v1/usage?by=model")),
}
# fmt: on


def check_complete(endpoints: Sequence[Endpoint] = ENDPOINTS) -> None:
    """Raise `StartupError` if an endpoint of the server has no builder, or a builder no endpoint."""
    declared = {(each.method, each.path) for each in endpoints}
    if different := declared ^ BUILDERS.keys():
        raise StartupError(f"endpoints and builders in bench/soak/workload.py differ: {sorted(different)}")


def draw_request(draw: Draw) -> SoakRequest:
    """Return a request for a random endpoint, by weight."""
    endpoint = draw.rng.choices(ENDPOINTS, weights=[BUILDERS[each.method, each.path][0] for each in ENDPOINTS])[0]
    path, body = BUILDERS[endpoint.method, endpoint.path][1](draw)
    return SoakRequest(endpoint=endpoint, path=path, body=body)


def remember(state: OrganizationState, request: SoakRequest, answer: Any) -> None:
    """Remember the ids of an object that a request has created."""
    where = request.endpoint.path
    if not isinstance(answer, dict):
        return
    if request.endpoint.method == "POST" and where == "/v1/responses":
        stored = answer.get("store") is not False and answer.get("status") in ("completed", "incomplete")
        if stored or answer.get("background"):
            state.responses.append(answer["id"])
    elif request.endpoint.method == "POST" and where == "/v1/conversations":
        state.conversations.append(answer["id"])
    elif where.endswith("/items") and where.startswith("/v1/conversations") and "data" in answer:
        conversation = request.path.split("/")[3]
        state.items.extend((conversation, item["id"]) for item in answer["data"])
    elif request.endpoint.method == "POST" and where == "/v1/files":
        state.files.append(answer["id"])
    elif request.endpoint.method == "POST" and where == "/v1/batches":
        state.batches.append(answer["id"])
    elif request.endpoint.method == "POST" and where == "/admin/keys":
        state.keys.append(answer["id"])
