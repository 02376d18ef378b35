from __future__ import annotations

import functools
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from syringa.api.chat.request import ChatRequest
from syringa.api.completions.request import CompletionRequest
from syringa.api.openapi.document import request_fields
from syringa.config import Config
from syringa.http.endpoints import PUBLISHED, openapi_document
from tests.api.chat.helpers import HI
from tests.api.chat.test_invalid_requests import INVALID as WRONG_CHAT
from tests.api.completions.test_invalid_requests import INVALID
from tests.client import client

# Rejected by rules that a schema cannot express: between fields, the model's vocabulary or context, a grammar's text.
BEYOND_SCHEMA = ("best_of", "min_tokens", "max_tokens", "stream_options", "tools", "tool_choice", "suffix", "grammar")


@pytest.mark.parametrize("secured", [True, False])
def test_document_is_valid_openapi(secured: bool) -> None:
    OpenAPIV31SpecValidator(openapi_document(secured=secured)).validate()


async def test_document_and_page_are_served_without_a_key() -> None:
    async with client(config=Config(api_key=("secret",))) as http:
        answer = await http.get("/openapi.json")
        assert answer.json() == openapi_document(secured=True)
        page = await http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page.text


def test_document_names_both_forms_of_a_key_and_the_root_path() -> None:
    document = openapi_document(secured=True, root_path="/llm")
    schemes = document["components"]["securitySchemes"]
    assert document["security"] == [{name: []} for name in schemes]
    assert {each.get("scheme") or each["name"] for each in schemes.values()} == {"bearer", "X-Api-Key"}
    assert document["servers"] == [{"url": "/llm"}]
    OpenAPIV31SpecValidator(document).validate()


def test_only_public_operations_require_no_key() -> None:
    public = {each.path for each in PUBLISHED if each.public}
    server = {"/health", "/ready", "/status", "/openapi.json", "/docs", "/version", "/ping"}
    assert public == server | {"/", "/console", "/console/{path}", "/api/version"}
    for path, methods in openapi_document(secured=True)["paths"].items():
        for operation in methods.values():
            assert (path in public) == (operation.get("security") == [])
            assert (path in public) == ("401" not in operation["responses"])
    unsecured = openapi_document(secured=False)["paths"]
    assert not any("401" in each["responses"] for methods in unsecured.values() for each in methods.values())


def test_document_describes_every_request_field() -> None:
    schemas = openapi_document(secured=False)["components"]["schemas"]
    for name, schema in schemas.items():
        if name.endswith("Request"):
            for field, about in schema["properties"].items():
                assert about.get("description"), f"{name}.{field}"
                assert "type" in about or "anyOf" in about or "enum" in about, f"{name}.{field}"


def test_documented_defaults_are_valid() -> None:
    fields = request_fields(CompletionRequest)
    shown = {name: schema["default"] for name, schema in fields.items() if "default" in schema}
    for name, value in shown.items():
        assert _errors({name: value}) == [], name
    assert shown["temperature"] == 1.0
    assert shown["max_tokens"] == 16


def _errors(body: dict[str, Any], name: str = "CompletionRequest") -> list[str]:
    return [error.message for error in _validator(name).iter_errors(body)]


@functools.cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    document = openapi_document(secured=False)
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("field", sorted(name for name, _ in request_fields(CompletionRequest).items()))
def test_completion_schema_accepts_null_as_absent(field: str) -> None:
    assert _errors({field: None}) == []


@pytest.mark.parametrize(("body", "param"), INVALID, ids=lambda value: str(value)[:60])
def test_completion_schema_rejects_what_the_server_rejects(body: dict[str, Any], param: str) -> None:
    text = str(body)
    vocabulary = "258" in text or "9" * 5000 in text or str(10**30) in text
    assert _errors(body) or param.startswith(BEYOND_SCHEMA) or vocabulary or "x" * 4081 in text


@pytest.mark.parametrize("field", sorted(name for name, _ in request_fields(ChatRequest).items() if name != "messages"))
def test_chat_schema_accepts_null_as_absent(field: str) -> None:
    assert _errors({"messages": HI, field: None}, "ChatRequest") == []


# The same for chat: the order of messages, the model's modalities, JSON inside a string.
BEYOND_CHAT = (
    *("min_tokens", "max_tokens", "stream_options", "tools", "tool_choice", "grammar", "logit_bias", "top_logprobs"),
    *("continue_final_message", "chat_template_kwargs", "reasoning_effort", "messages[1].tool_call_id"),
    *("messages[0].tool_call_id", "messages[0].tool_calls[0].function.arguments", "messages[0].content"),
)


@pytest.mark.parametrize(("body", "param"), WRONG_CHAT, ids=lambda value: str(value)[:60])
def test_chat_schema_rejects_what_the_server_rejects(body: dict[str, Any], param: str) -> None:
    assert _errors({"messages": HI} | body, "ChatRequest") or param.startswith(BEYOND_CHAT)


PATHS_WITH_MODEL = [
    each.path
    for each in PUBLISHED
    if each.operation.request is not None
    and "model" in each.operation.request.__struct_fields__
    # The model of these is another one than the one that is used.
    and (each.method, each.path)
    not in (("post", "/api/create"), ("delete", "/api/delete"), ("post", "/admin/models/pull"))
]


@pytest.mark.parametrize("path", PATHS_WITH_MODEL)
async def test_document_lists_the_errors_of_a_bad_body(path: str) -> None:
    listed = openapi_document(secured=False)["paths"][path]["post"]["responses"]
    body = {"prompt": "x", "tokens": [1], "model": "other", "messages": HI, "max_tokens": 1, "input": "x"}
    body |= {"query": "x", "documents": [{"text": "x"}], "text_1": "x", "text_2": "x"}
    async with client(config=Config(max_body_bytes=300)) as http:
        seen = [
            await http.post(path, content=b"{", headers={"content-type": "application/json"}),
            await http.post(path, json=body),
            await http.post(path, content=b"x" * 301, headers={"content-type": "application/json"}),
            await http.post(path, content=b"x", headers={"content-type": "text/plain"}),
        ]
    assert [answer.status_code for answer in seen] == [400, 404, 413, 415]
    assert {str(answer.status_code) for answer in seen} <= listed.keys()
