"""`/openapi.json`: the endpoints in OpenAPI 3.1. Bodies are generated from the wire types, never written twice."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from syringa.api import chat, chat_writer, completions, completions_writer, tokens
from syringa.api.common import ErrorEnvelope
from syringa.api.describe import DEFAULT

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = """\
An LLM inference server with the OpenAI APIs.

A field is honoured or refused, never dropped in silence: one that is not known is named in the response header
`x-syringa-ignored`. `null` means absent. Errors have one shape on every endpoint, with the JSON path of the field at
fault in `param`."""

_ERRORS = {
    400: "A field is of the wrong type, out of range, or asks for what cannot be done; or the body is not JSON.",
    401: "The key is missing or not valid.",
    404: "There is no such model; the message lists those that there are.",
    413: "The body is larger than the server allows.",
    415: "The body is not `application/json`.",
    500: "The fault is ours.",
    503: "The model is loading, the queue is full, or the server is ending: try again after `Retry-After` seconds.",
}
_REQUEST_ID = {"description": "Names the request; the client's own id, if it sent one.", "schema": {"type": "string"}}
_IGNORED = {"description": "The fields that were not honoured, by path.", "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "Seconds to wait.", "schema": {"type": "integer"}}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One method on one path. `errors` are the statuses that it can give, beside 401 where keys are set."""

    id: str
    tag: str
    summary: str
    method: str = "get"
    description: str = ""
    request: type[msgspec.Struct] | None = None
    example: dict[str, Any] = field(default_factory=dict)
    answer: type[msgspec.Struct] | dict[str, Any] | None = None
    media: str = "application/json"
    chunk: type[msgspec.Struct] | None = None  # what a stream sends
    parameters: dict[str, str] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    public: bool = False


_POST_ERRORS = (400, 404, 413, 415, 500)


def _completions(id: str) -> Operation:
    return Operation(
        id=id,
        tag="Completions",
        summary="Continue a text",
        method="post",
        description="Continues each prompt `n` times. With `stream`, as server-sent events: chunks of the same shape,"
        " then `[DONE]`; an error in the middle is the last event.",
        request=completions.CompletionRequest,
        example={"prompt": "The lilac is in bloom and", "max_tokens": 16, "temperature": 0.7, "seed": 1},
        answer=completions_writer.Completion,
        chunk=completions_writer.Completion,
        errors=(*_POST_ERRORS, 503),
    )


def _chat(id: str) -> Operation:
    return Operation(
        id=id,
        tag="Chat",
        summary="Answer a conversation",
        method="post",
        description="Answers the messages `n` times, through the model's chat template. With `stream`, as server-sent"
        " events: chunks with what is new, then `[DONE]`; an error in the middle is the last event.",
        request=chat.ChatRequest,
        example={"messages": [{"role": "user", "content": "Which shrub is in bloom?"}], "max_completion_tokens": 64},
        answer=chat_writer.ChatCompletion,
        chunk=chat_writer.ChatChunk,
        errors=(*_POST_ERRORS, 503),
    )


def _models(id: str) -> Operation:
    return Operation(id=id, tag="Models", summary="List the models", answer=tokens.ModelList)


OPERATIONS: dict[str, Operation] = {
    "/v1/chat/completions": _chat("createChatCompletion"),
    "/api/v2/chat/completions": _chat("createChatCompletionV2"),
    "/v1/completions": _completions("createCompletion"),
    "/api/v2/completions": _completions("createCompletionV2"),
    "/v1/models": _models("listModels"),
    "/api/v2/models": _models("listModelsV2"),
    "/v1/models/{id}": Operation(
        id="showModel",
        tag="Models",
        summary="Show a model",
        answer=tokens.ModelEntry,
        parameters={"id": "An id, an alias, or `default`. May contain slashes."},
        errors=(404,),
    ),
    "/tokenize": Operation(
        id="tokenize",
        tag="Tokens",
        summary="Text or messages to tokens",
        method="post",
        request=tokens.TokenizeRequest,
        example={"prompt": "Hello, world", "return_token_strs": True},
        answer=tokens.TokenizeResponse,
        errors=_POST_ERRORS,
    ),
    "/detokenize": Operation(
        id="detokenize",
        tag="Tokens",
        summary="Tokens to text",
        method="post",
        request=tokens.DetokenizeRequest,
        example={"tokens": [72, 105]},
        answer=tokens.DetokenizeResponse,
        errors=_POST_ERRORS,
    ),
    "/health": Operation(
        id="health",
        tag="Service",
        summary="Whether the server can answer",
        answer={"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}}},
        errors=(503,),
        public=True,
    ),
    "/openapi.json": Operation(
        id="openapi", tag="Service", summary="This document", answer={"type": "object"}, public=True
    ),
    "/docs": Operation(
        id="docs", tag="Service", summary="A page to read it", answer={"type": "string"}, media="text/html", public=True
    ),
}


def document(*, secured: bool) -> dict[str, Any]:
    """The whole document. `secured`: keys are configured, and every endpoint that is not public wants one."""
    components: dict[str, Any] = {"schemas": schemas()}
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Syringa",
            "version": _version(),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(each.tag for each in OPERATIONS.values())],
        "paths": {path: {each.method: _operation(each, secured)} for path, each in OPERATIONS.items()},
        "components": components,
    }
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return whole


def _version() -> str:
    try:
        return importlib.metadata.version("syringa")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed


def schemas() -> dict[str, Any]:
    """Every wire type of the endpoints, by name."""
    answers = (type_ for each in OPERATIONS.values() for type_ in (each.answer, each.chunk))
    wires = [each.request for each in OPERATIONS.values()] + [each for each in answers if isinstance(each, type)]
    named = list(dict.fromkeys(each for each in [*wires, ErrorEnvelope] if each is not None))
    _, components = msgspec.json.schema_components(named, ref_template=_REFERENCE)
    requests = {each.request.__name__: each.request for each in OPERATIONS.values() if each.request is not None}
    for name, schema in components.items():
        if name in requests:
            # An endpoint's own fields before those that all share.
            own = dict.fromkeys(requests[name].__annotations__)
            schema["properties"] = {key: schema["properties"][key] for key in own | schema["properties"]}
        else:
            # What we send has every field, but for those that may be unset: they alone have no default.
            properties = schema["properties"].items()
            schema["required"] = [key for key, each in properties if "default" in each or key in schema["required"]]
    return {name: _tidy(schema) for name, schema in components.items()}


def _operation(operation: Operation, secured: bool) -> dict[str, Any]:
    body: dict[str, Any] = {"operationId": operation.id, "tags": [operation.tag], "summary": operation.summary}
    if operation.description:
        body["description"] = operation.description
    if operation.parameters:
        body["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
            for name, text in operation.parameters.items()
        ]
    if operation.request is not None:
        content = {"schema": _ref(operation.request), "example": operation.example}
        body["requestBody"] = {"required": True, "content": {"application/json": content}}
    locked = secured and not operation.public
    statuses = sorted({*operation.errors, 401} if locked else operation.errors)
    body["responses"] = {"200": _success(operation)} | {str(status): _error(status) for status in statuses}
    if secured and operation.public:
        body["security"] = []
    return body


def _success(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    schema = _ref(answer) if isinstance(answer, type) else answer
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.chunk is not None:
        content["text/event-stream"] = {"schema": _event(operation.chunk)}
    headers = {"x-request-id": _REQUEST_ID}
    if operation.request is not None:
        headers["x-syringa-ignored"] = _IGNORED
    return {"description": "Done.", "headers": headers, "content": content}


def _event(chunk: type) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 describes them; 3.1 leaves it open."""
    contents = {"anyOf": [_ref(chunk), _ref(ErrorEnvelope)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": contents}
    return {
        "description": f"Lines `data: …`, each with a `{chunk.__name__}` that holds what is new, or with an"
        " `ErrorEnvelope`; then `data: [DONE]`. Lines that begin with a colon are comments.",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}},
    }


def _error(status: int) -> dict[str, Any]:
    headers = {"x-request-id": _REQUEST_ID} | ({"retry-after": _RETRY_AFTER} if status == 503 else {})
    content = {"application/json": {"schema": _ref(ErrorEnvelope)}}
    return {"description": _ERRORS[status], "headers": headers, "content": content}


def _ref(wire: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=wire.__name__)}


def _tidy(schema: Any) -> Any:
    """msgspec's schema as a person would write it: `type: [x, "null"]`, and the default that an absent field has."""
    if isinstance(schema, list):
        return [_tidy(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {key: _tidy(value) for key, value in schema.items() if key != DEFAULT}
    if "default" in tidy and tidy["default"] in (None, []):
        del tidy["default"]
    if DEFAULT in schema:
        tidy["default"] = schema[DEFAULT]
    alternatives = tidy.get("anyOf")
    if isinstance(alternatives, list) and len(alternatives) == 2 and alternatives[1] == {"type": "null"}:
        return _or_null(alternatives[0], {key: value for key, value in tidy.items() if key != "anyOf"})
    return tidy


def _or_null(schema: dict[str, Any], around: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]} | around
    if isinstance(schema.get("type"), str) and not {"enum", "const"} & schema.keys():
        return schema | {"type": [schema["type"], "null"]} | around
    return {"anyOf": [schema, {"type": "null"}]} | around


def fields(wire: type[msgspec.Struct]) -> Iterable[tuple[str, dict[str, Any]]]:
    """A wire type's fields, each with its schema."""
    properties: dict[str, dict[str, Any]] = schemas()[wire.__name__]["properties"]
    return properties.items()
