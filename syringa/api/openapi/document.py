"""Generation of the OpenAPI 3.1 document. Schemas are generated from the wire types."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from syringa.api.error_formats import ERROR_BODIES, ErrorFormat
from syringa.api.fields.schema import DEFAULT
from syringa.api.openapi.operations import Operation
from syringa.version import installed_version

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = """\
An LLM inference server with the OpenAI APIs.

Every field is honored or rejected; unknown fields are named in the response header `x-syringa-ignored`. `null` means
absent. All endpoints return errors in the same shape, with the JSON path of the offending field in `param`."""

_ERRORS = {
    400: "A field has the wrong type, is out of range or asks for something unsupported; or the body is not JSON.",
    401: "The API key is missing or invalid.",
    403: "The API key does not permit this operation or this model.",
    404: "The model does not exist (the message lists those that do), or no object has this id.",
    413: "The body exceeds the server's size limit.",
    415: "The body is not `application/json`.",
    424: "An MCP server in `tools` could not list its tools, or a model could not be downloaded.",
    429: "The API key or its organization exceeds a rate limit: retry after `Retry-After` seconds.",
    500: "Internal error.",
    503: "The model is loading, the queue is full, or the server is shutting down: retry after `Retry-After` seconds.",
}
_REQUEST_ID = {"description": "The id of the request: the client's own, if it sent one.", "schema": {"type": "string"}}
_IGNORED = {"description": "JSON paths of the fields that were ignored.", "schema": {"type": "string"}}
_RETRY_AFTER = {"description": "Seconds to wait before a retry.", "schema": {"type": "integer"}}


class PublishedOperation(NamedTuple):
    """An operation at its place in the API. `public`: requires no API key.

    `shared`: clients of Anthropic's API get its error bodies.
    """

    method: str  # in lower case
    path: str
    operation: Operation
    public: bool
    error_format: ErrorFormat = "openai"
    shared: bool = False


def document(published: Sequence[PublishedOperation], *, secured: bool, root_path: str = "") -> dict[str, Any]:
    """Return the OpenAPI document. `secured`: API keys are configured, and all but public operations require one.

    `root_path`: the path under which clients find the API.
    """
    operations = [each.operation for each in published]
    components: dict[str, Any] = {"schemas": schemas(operations)}
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Syringa",
            "version": installed_version(),
            "description": _DESCRIPTION,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "tags": [{"name": tag} for tag in dict.fromkeys(operation.tag for operation in operations)],
        "paths": _paths(published, secured),
        "components": components,
    }
    if secured:
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "key_header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
        }
        result["security"] = [{"key": []}, {"key_header": []}]
    if root_path:
        result["servers"] = [{"url": root_path}]
    return result


def _paths(published: Sequence[PublishedOperation], secured: bool) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for each in published:
        paths.setdefault(each.path, {})[each.method] = _operation(each, secured)
    return paths


def schemas(operations: Iterable[Operation]) -> dict[str, Any]:
    """Return the schemas of all wire types that the operations use, by name."""
    operations = list(operations)
    requests = {each.request.__name__: each.request for each in operations if each.request is not None}
    responses = (type_ for each in operations for type_ in (each.response, each.alternative, *each.chunks))
    wire_types = [*requests.values(), *(each for each in responses if isinstance(each, type)), *ERROR_BODIES.values()]
    _, components = msgspec.json.schema_components(list(dict.fromkeys(wire_types)), ref_template=_REFERENCE)
    for name, schema in components.items():
        if name in requests:
            # An endpoint's own fields before those that all share.
            annotated = requests[name].__annotations__
            fields = msgspec.structs.fields(requests[name])
            own = dict.fromkeys(field.encode_name for field in fields if field.name in annotated)
            schema["properties"] = {key: schema["properties"][key] for key in own | schema["properties"]}
        else:
            # A response has every field but those that may be unset: only those have no default.
            properties = schema["properties"].items()
            schema["required"] = [key for key, each in properties if "default" in each or key in schema["required"]]
    return {name: _tidy(schema) for name, schema in components.items()}


def request_fields(request: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """Return the schema of each field of a request body."""
    properties: dict[str, dict[str, Any]] = schemas([Operation(id="", tag="", summary="", request=request)])[
        request.__name__
    ]["properties"]
    return properties


def _operation(published: PublishedOperation, secured: bool) -> dict[str, Any]:
    operation = published.operation
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
        body["requestBody"] = {"required": True, "content": {operation.request_media_type: content}}
    locked = secured and not published.public
    key_errors = {401, *({403, 429} if published.method == "post" else ())} if locked else set()
    statuses = sorted({*operation.errors, *key_errors})
    error = ERROR_BODIES[published.error_format]
    body["responses"] = {"200": _success(operation, error)} | {
        str(each): _error(each, error, ERROR_BODIES["anthropic"] if published.shared else None) for each in statuses
    }
    if secured and published.public:
        body["security"] = []
    return body


def _success(operation: Operation, error: type) -> dict[str, Any]:
    response = operation.response
    schema = _ref(response) if isinstance(response, type) else response
    if operation.alternative is not None:
        schema = {"anyOf": [schema, _ref(operation.alternative)]}
    content: dict[str, Any] = {operation.media_type: {"schema": schema}} if operation.media_type else {}
    if operation.text_media_type:
        content[operation.text_media_type] = {"schema": {"type": "string"}}
    if operation.chunks and operation.lines:
        content["application/x-ndjson"] = {"schema": _line(operation, error)}
    elif operation.chunks:
        content["text/event-stream"] = {"schema": _event(operation, error)}
    headers = {"x-request-id": _REQUEST_ID}
    if operation.request is not None:
        headers["x-syringa-ignored"] = _IGNORED
    return {"description": "Success.", "headers": headers, "content": content}


def _line(operation: Operation, error: type) -> dict[str, Any]:
    """Return the schema of a line of a stream, in the form of OpenAPI 3.2 (3.1 does not define one)."""
    contents = [_ref(each) for each in (*operation.chunks, error)]
    return {"description": "One line of JSON for each object.", "anyOf": contents}


def _event(operation: Operation, error: type) -> dict[str, Any]:
    """Return the schema of a server-sent event, in the form of OpenAPI 3.2 (3.1 does not define one)."""
    contents = {"anyOf": [*(_ref(each) for each in operation.chunks), _ref(error)]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": contents}
    names = " or ".join(f"`{each.__name__}`" for each in operation.chunks)
    done = "; then `data: [DONE]`" if operation.done else ""
    return {
        "description": f"`data: …` lines, each with a {names}, or with an `{error.__name__}`{done}. Lines that begin"
        " with a colon are comments.",
        "type": "object",
        "required": ["data"],
        "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]} if operation.done else data},
    }


def _error(status: int, error: type, alternative: type | None) -> dict[str, Any]:
    headers = {"x-request-id": _REQUEST_ID} | ({"retry-after": _RETRY_AFTER} if status in (429, 503) else {})
    schema = _ref(error) if alternative is None else {"anyOf": [_ref(error), _ref(alternative)]}
    content = {"application/json": {"schema": schema}}
    return {"description": _ERRORS[status], "headers": headers, "content": content}


def _ref(wire_type: type) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(name=wire_type.__name__)}


def _tidy(schema: Any) -> Any:
    """Simplify msgspec's schema: `type: [x, "null"]` instead of `anyOf`, and the default of an absent field."""
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


def _or_null(schema: dict[str, Any], outer: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]} | outer
    if isinstance(schema.get("type"), str) and not {"enum", "const"} & schema.keys():
        return schema | {"type": [schema["type"], "null"]} | outer
    return {"anyOf": [schema, {"type": "null"}]} | outer
