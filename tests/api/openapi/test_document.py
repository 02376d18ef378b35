from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.routing import Route

from syringa.api.chat.request import ChatRequest
from syringa.api.completions.request import CompletionRequest
from syringa.api.models.served_model import FixedModels
from syringa.api.openapi.document import OPERATIONS, document, fields
from syringa.config import Config
from syringa.engine.interface import Sole
from syringa.http.dispatch import Desk
from syringa.http.middleware.auth import PUBLIC_PATHS
from syringa.http.routes.openai import Api
from syringa.service.app_state import Work
from tests.api.chat.chatting import HI
from tests.api.chat.test_bad_input import WRONG as WRONG_CHAT
from tests.api.completions.test_bad_input import WRONG
from tests.client import client
from tests.fake_engine import FakeEngine, fake_model

# Refused for what the document cannot say: a rule between fields, the model's vocabulary or context, a grammar's text.
BEYOND_SCHEMA = ("best_of", "min_tokens", "max_tokens", "stream_options", "tools", "tool_choice", "suffix", "grammar")


@pytest.mark.parametrize("secured", [True, False])
def test_it_is_openapi(secured: bool) -> None:
    OpenAPIV31SpecValidator(document(secured=secured)).validate()


def test_every_route_is_in_it_and_nothing_else() -> None:
    api = Api(Config(), Desk(Sole(FakeEngine())), FixedModels([fake_model()]), Work(Config()))
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in api.routes()
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD"
    }
    assert routes == {
        (path, method) for path, methods in document(secured=False)["paths"].items() for method in methods
    }


async def test_it_is_served_without_a_key() -> None:
    async with client(config=Config(api_key=("secret",))) as http:
        answer = await http.get("/openapi.json")
        assert answer.json() == document(secured=True)
        page = await http.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page.text


def test_public_paths_need_no_key_and_all_others_do() -> None:
    for path, methods in document(secured=True)["paths"].items():
        for operation in methods.values():
            assert (path in PUBLIC_PATHS) == (operation.get("security") == [])
            assert (path in PUBLIC_PATHS) == ("401" not in operation["responses"])
    assert not any("401" in each["responses"] for m in document(secured=False)["paths"].values() for each in m.values())


def test_every_field_of_a_request_is_described() -> None:
    schemas = document(secured=False)["components"]["schemas"]
    for name, schema in schemas.items():
        if name.endswith("Request"):
            for field, about in schema["properties"].items():
                assert about.get("description"), f"{name}.{field}"
                assert "type" in about or "anyOf" in about or "enum" in about, f"{name}.{field}"


def test_defaults_are_valid_and_true() -> None:
    shown = {name: schema["default"] for name, schema in fields(CompletionRequest) if "default" in schema}
    for name, value in shown.items():
        assert _errors({name: value}) == [], name
    assert shown["temperature"] == 1.0
    assert shown["max_tokens"] == 16


def _errors(body: dict[str, Any], name: str = "CompletionRequest") -> list[str]:
    whole = document(secured=False)
    schema = {"$ref": f"#/components/schemas/{name}", "components": whole["components"]}
    return [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(body)]


@pytest.mark.parametrize("field", sorted(name for name, _ in fields(CompletionRequest)))
def test_null_is_absent_in_the_schema_too(field: str) -> None:
    assert _errors({field: None}) == []


@pytest.mark.parametrize(("body", "param"), WRONG, ids=lambda value: str(value)[:60])
def test_the_schema_refuses_what_the_server_refuses(body: dict[str, Any], param: str) -> None:
    text = str(body)
    vocabulary = "258" in text or "9" * 5000 in text or str(10**30) in text
    assert _errors(body) or param.startswith(BEYOND_SCHEMA) or vocabulary or "x" * 4081 in text


@pytest.mark.parametrize("field", sorted(name for name, _ in fields(ChatRequest) if name != "messages"))
def test_null_is_absent_in_chat_too(field: str) -> None:
    assert _errors({"messages": HI, field: None}, "ChatRequest") == []


# The same for chat: the order of messages, what the model can see, JSON inside of a string.
BEYOND_CHAT = (
    *("min_tokens", "max_tokens", "stream_options", "tools", "tool_choice", "grammar", "logit_bias", "top_logprobs"),
    *("continue_final_message", "chat_template_kwargs", "reasoning_effort", "messages[1].tool_call_id"),
    *("messages[0].tool_call_id", "messages[0].tool_calls[0].function.arguments", "messages[0].content"),
)


@pytest.mark.parametrize(("body", "param"), WRONG_CHAT, ids=lambda value: str(value)[:60])
def test_the_schema_refuses_what_chat_refuses(body: dict[str, Any], param: str) -> None:
    assert _errors({"messages": HI} | body, "ChatRequest") or param.startswith(BEYOND_CHAT)


ASKS_A_MODEL = [
    each.path for each in OPERATIONS if each.request is not None and "model" in each.request.__struct_fields__
]


@pytest.mark.parametrize("path", ASKS_A_MODEL)
async def test_the_refusals_of_a_body_are_in_it(path: str) -> None:
    listed = document(secured=False)["paths"][path]["post"]["responses"]
    async with client(config=Config(max_body_bytes=100)) as http:
        seen = [
            await http.post(path, content=b"{"),
            await http.post(path, json={"prompt": "x", "tokens": [1], "model": "other", "messages": HI}),
            await http.post(path, content=b"x" * 101),
            await http.post(path, content=b"x", headers={"content-type": "text/plain"}),
        ]
    assert [answer.status_code for answer in seen] == [400, 404, 413, 415]
    assert {str(answer.status_code) for answer in seen} <= listed.keys()
