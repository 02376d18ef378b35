"""`/openapi.json`: the endpoints in OpenAPI 3.1. Bodies are generated from the wire types, never written twice."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from typing import Any

import msgspec

from syringa.api.decoding import ErrorEnvelope
from syringa.api.fields.annotations import DEFAULT
from syringa.api.openapi import admin_operations, operations, responses_operations
from syringa.api.openapi.operations import Operation

OPERATIONS = (*operations.OPERATIONS, *responses_operations.OPERATIONS, *admin_operations.OPERATIONS)

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = """\
An LLM inference server with the OpenAI APIs.

A field is honoured or refused, never dropped in silence: one that is not known is named in the response header
`x-syringa-ignored`. `null` means absent. Errors have one shape on every endpoint, with the JSON path of the field at
fault in `param`."""

_ERRORS = {
    400: "A field is of the wrong type, out of range, or asks for what cannot be done; or the body is not JSON.",
    401: "The key is missing or not valid.",
    403: "The key may not do this, or may not use this model.",
    404: "There is no such model, and the message lists those that there are; or nothing has such an id.",
    413: "The body is larger than the server allows.",
    415: "The body is not `application/json`.",
    429: "The key or its organisation is over a limit: try again after `Retry-After` seconds.",
    500: "The fault is ours.",
    503: "The model is loading, the queue is full, or the server is ending: try again after `Retry-After` seconds.",
}
_REQUEST_ID = {"description": "Names the request; the client's own id, if it sent one.", "schema": {"type": "string"}}
_IGNORED = {"description": "The fields that were not honoured, by path.", "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "Seconds to wait.", "schema": {"type": "integer"}}


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
        "tags": [{"name": tag} for tag in dict.fromkeys(each.tag for each in OPERATIONS)],
        "paths": _paths(secured),
        "components": components,
    }
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
    return whole


def _paths(secured: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each, secured)
    return paths


def _version() -> str:
    try:
        return importlib.metadata.version("syringa")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a checkout that is not installed


def schemas() -> dict[str, Any]:
    """Every wire type of the endpoints, by name."""
    answers = (type_ for each in OPERATIONS for type_ in (each.answer, *each.chunks))
    wires = [each.request for each in OPERATIONS] + [each for each in answers if isinstance(each, type)]
    named = list(dict.fromkeys(each for each in [*wires, ErrorEnvelope] if each is not None))
    _, components = msgspec.json.schema_components(named, ref_template=_REFERENCE)
    requests = {each.request.__name__: each.request for each in OPERATIONS if each.request is not None}
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
    if operation.parameters or operation.query:
        body["parameters"] = [
            {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string"}}
            for name, text in operation.parameters.items()
        ] + [{"name": name, "in": "query", "required": False} | about for name, about in operation.query.items()]
    if operation.request is not None:
        content = {"schema": _ref(operation.request), "example": operation.example}
        body["requestBody"] = {"required": True, "content": {"application/json": content}}
    locked = secured and not operation.public
    of_keys = {401, *({403, 429} if operation.method == "post" else ())} if locked else set()
    statuses = sorted({*operation.errors, *of_keys})
    body["responses"] = {"200": _success(operation)} | {str(status): _error(status) for status in statuses}
    if secured and operation.public:
        body["security"] = []
    return body


def _success(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    schema = _ref(answer) if isinstance(answer, type) else answer
    content: dict[str, Any] = {operation.media: {"schema": schema}}
    if operation.also:
        content[operation.also] = {"schema": {"type": "string"}}
    if operation.chunks:
        content["text/event-stream"] = {"schema": _event(operation)}
    headers = {"x-request-id": _REQUEST_ID}
    if operation.request is not None:
        headers["x-syringa-ignored"] = _IGNORED
    return {"description": "Done.", "headers": headers, "content": content}


def _event(operation: Operation) -> dict[str, Any]:
    """One server-sent event, as OpenAPI 3.2 describes them; 3.1 leaves it open."""
    contents = {"anyOf": [*(_ref(each) for each in operation.chunks), _ref(ErrorEnvelope)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": contents}
    names = " or ".join(f"`{each.__name__}`" for each in operation.chunks)
    done = "; then `data: [DONE]`" if operation.done else ""
    return {
        "description": f"Lines `data: …`, each with a {names} that holds what is new, or with an"
        f" `ErrorEnvelope`{done}. Lines that begin with a colon are comments.",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]} if operation.done else data},
    }


def _error(status: int) -> dict[str, Any]:
    headers = {"x-request-id": _REQUEST_ID} | ({"retry-after": _RETRY_AFTER} if status in (429, 503) else {})
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
