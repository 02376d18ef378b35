"""The table of endpoints is complete, consistent, and the only list of paths."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from starlette.requests import Request

import syringa
from syringa.api.models.served_model import FixedModels
from syringa.api.openapi import (
    admin_operations,
    anthropic_operations,
    batch_operations,
    embedding_operations,
    ollama_operations,
    operations,
    responses_operations,
)
from syringa.api.openapi.operations import Operation
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.http.app import create_handlers
from syringa.http.dispatch import GenerationDispatcher
from syringa.http.endpoints import ENDPOINTS, PUBLISHED, Handlers, openapi_document
from syringa.http.routing import WEBSOCKET, Access, Endpoint, Router
from syringa.service.app_state import AppState
from tests.fake_engine import FakeEngine, fake_model

PACKAGE = Path(syringa.__file__).parent
TABLE = PACKAGE / "http" / "endpoints.py"
PREFIXES = ("/v1/", "/api/v2/", "/admin/")
OLLAMA_WRITES = ("/api/pull", "/api/create", "/api/copy", "/api/delete")


@pytest.fixture
def handlers() -> Handlers:
    config = Config()
    app_state = AppState(config)
    dispatcher = GenerationDispatcher(SingleEngineProvider(FakeEngine()), app_state.key_watch)
    return create_handlers(config, dispatcher, FixedModels([fake_model()]), app_state)


def test_endpoints_are_declared_once() -> None:
    declared = [(endpoint.method, endpoint.path) for endpoint in ENDPOINTS]
    assert len(declared) == len(set(declared))


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_endpoint_has_handler_access_label_and_operation(endpoint: Endpoint, handlers: Handlers) -> None:
    assert callable(endpoint.handler(handlers))
    assert isinstance(endpoint.access, Access)
    assert endpoint.metrics_label == (endpoint.path if endpoint.metered else "")
    assert "{" not in endpoint.metrics_label  # a label must not depend on what a client sends
    assert (endpoint.operation is None) == (endpoint.method == WEBSOCKET)  # OpenAPI has no WebSockets
    administers = endpoint.path.startswith("/admin/") or endpoint.path in OLLAMA_WRITES
    assert administers == (endpoint.access is Access.ADMIN)
    assert (endpoint.error_format == "ollama") == (endpoint.path.startswith("/api/") and "/v2/" not in endpoint.path)


@pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda endpoint: f"{endpoint.method} {endpoint.path}")
def test_router_resolves_every_endpoint(endpoint: Endpoint, handlers: Handlers) -> None:
    path = endpoint.path.replace(":path}", "}").replace("{", "").replace("}", "")
    kind = "websocket" if endpoint.method == WEBSOCKET else "http"
    assert Router(ENDPOINTS, handlers).resolve({"type": kind, "method": endpoint.method, "path": path}) is endpoint


@pytest.mark.parametrize("root", ["/llm", "/a/b", "/v1", "/api"])
def test_router_resolves_every_endpoint_with_and_without_root_path(root: str, handlers: Handlers) -> None:
    router = Router(ENDPOINTS, handlers, root)
    declared = {endpoint.path for endpoint in ENDPOINTS}
    for endpoint in ENDPOINTS:
        path = endpoint.path.replace(":path}", "}").replace("{", "").replace("}", "")
        kind = "websocket" if endpoint.method == WEBSOCKET else "http"
        for given in (path, root + path):
            if given == path and path.startswith(root) and path.removeprefix(root) in declared:
                continue  # under /v1, /v1/rerank is /rerank
            assert router.resolve({"type": kind, "method": endpoint.method, "path": given}) is endpoint, given


@pytest.mark.parametrize("path", ["/llm", "/llmx/health", "/llm/nothing", "/other/health", "/LLM/health"])
def test_router_finds_nothing_at_other_paths_than_the_root_path(path: str, handlers: Handlers) -> None:
    router = Router(ENDPOINTS, handlers, "/llm")
    assert router.resolve({"type": "http", "method": "GET", "path": path}).path == ""


def test_router_keeps_path_parameters_and_methods_under_root_path(handlers: Handlers) -> None:
    router = Router(ENDPOINTS, handlers, "/llm")
    scope = {"type": "http", "method": "GET", "path": "/llm/v1/models/org/name"}
    assert router.resolve(scope).path == "/v1/models/{id:path}"
    assert scope["path_params"] == {"id": "org/name"}
    scope = {"type": "http", "method": "PUT", "path": "/llm/v1/completions"}
    assert router.resolve(scope).path == "/v1/completions"  # and responds with 405


def test_openapi_document_has_exactly_the_published_endpoints() -> None:
    document = openapi_document(secured=False)
    documented = {(path, method) for path, methods in document["paths"].items() for method in methods}
    declared = {
        (endpoint.path.replace(":path}", "}"), endpoint.method.lower())
        for endpoint in ENDPOINTS
        if endpoint.operation is not None
    }
    assert documented == declared
    ids = [each.operation.id for each in PUBLISHED]
    assert len(ids) == len(set(ids))


def test_every_operation_belongs_to_an_endpoint() -> None:
    modules = (
        *(operations, anthropic_operations, batch_operations, embedding_operations),
        *(ollama_operations, responses_operations, admin_operations),
    )
    described = {id(value) for module in modules for value in vars(module).values() if isinstance(value, Operation)}
    assert described == {id(endpoint.operation) for endpoint in ENDPOINTS if endpoint.operation is not None}


@pytest.mark.parametrize("file", sorted((PACKAGE / "http").rglob("*.py")), ids=lambda file: str(file.name))
def test_no_other_module_of_the_http_package_lists_paths(file: Path) -> None:
    if file == TABLE:
        return
    tree = ast.parse(file.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    assert not [each.value for each in strings if each.value.startswith(PREFIXES) and id(each) not in docstrings]


def test_metrics_do_not_list_paths() -> None:
    for file in (PACKAGE / "service").rglob("*.py"):
        assert not any(f'"{prefix}' in file.read_text() for prefix in PREFIXES), file


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("POST", "/health", "GET, HEAD"), ("PATCH", "/v1/responses/x", "DELETE, GET, HEAD"), ("GET", "/nowhere", None)],
)
def test_router_resolves_unknown_requests_to_rejecting_endpoints(
    method: str, path: str, allow: str | None, handlers: Handlers
) -> None:
    endpoint = Router(ENDPOINTS, handlers).resolve({"type": "http", "method": method, "path": path})
    assert endpoint not in ENDPOINTS
    assert endpoint.operation is None
    assert not endpoint.metered
    assert endpoint.access is (Access.PUBLIC if path == "/health" else Access.API_KEY)


def test_router_stores_path_parameters(handlers: Handlers) -> None:
    scope = {"type": "http", "method": "GET", "path": "/v1/models/a/b", "headers": []}
    Router(ENDPOINTS, handlers).resolve(scope)
    assert Request(scope).path_params == {"id": "a/b"}
