"""What `syringa.http.server` relies on in uvicorn and Starlette beyond their documented interfaces.

uvicorn and Starlette are capped below their next minor version in pyproject.toml. After an upgrade, a failure here
names what has changed; see `connection`, `request_cycle` and `server` in `syringa.http.server` for how it is used.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import pytest
import uvicorn
from starlette.routing import compile_path
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets import websockets_sansio_impl
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.server import ServerProtocol

from syringa.http.server import connection, request_cycle, server, websocket_connection

ATTRIBUTES: dict[type, tuple[str, ...]] = {
    HttpToolsProtocol: (
        *("app", "loop", "logger", "access_logger", "parser", "connections", "tasks", "server_state", "transport"),
        *("flow", "scheme", "pipeline", "scope", "headers", "expect_100_continue", "cycle"),
    ),
    RequestResponseCycle: (
        *("scope", "transport", "flow", "message_event", "on_response", "disconnected", "keep_alive", "more_body"),
        *("waiting_for_100_continue", "response_started", "response_complete", "chunked_encoding"),
        "expected_content_length",
    ),
    WebSocketsSansIOProtocol: (
        *("config", "conn", "handshake_initiated", "transport", "loop", "logger", "frames", "read_paused", "queue"),
        *("close_sent", "close_timer", "handshake_complete", "scope", "curr_msg_data_type"),
    ),
    FlowControl: ("read_paused", "write_paused"),
    uvicorn.Server: ("server_state", "should_exit"),
    ServerState: ("connections", "tasks"),
}

# The package sse-starlette, which the MCP client brings, replaces it when it is imported.
SERVER_HANDLE_EXIT = getattr(
    getattr(sys.modules.get("sse_starlette.sse"), "AppStatus", None), "original_handler", uvicorn.Server.handle_exit
)

PARAMETERS: dict[Any, tuple[str, ...]] = {
    HttpToolsProtocol.__init__: ("self", "config", "server_state", "app_state", "_loop"),
    HttpToolsProtocol.connection_made: ("self", "transport"),
    HttpToolsProtocol.connection_lost: ("self", "exc"),
    HttpToolsProtocol.data_received: ("self", "data"),
    HttpToolsProtocol.shutdown: ("self",),
    HttpToolsProtocol.pause_writing: ("self",),
    HttpToolsProtocol.resume_writing: ("self",),
    HttpToolsProtocol.on_message_begin: ("self",),
    HttpToolsProtocol.on_url: ("self", "url"),
    HttpToolsProtocol.on_header: ("self", "name", "value"),
    HttpToolsProtocol.on_headers_complete: ("self",),
    HttpToolsProtocol.on_body: ("self", "body"),
    HttpToolsProtocol.on_message_complete: ("self",),
    HttpToolsProtocol.on_response_complete: ("self",),
    HttpToolsProtocol.handle_websocket_upgrade: ("self",),
    HttpToolsProtocol._should_upgrade: ("self",),
    HttpToolsProtocol._start_asgi_task: ("self", "cycle", "app"),
    HttpToolsProtocol._unset_keepalive_if_required: ("self",),
    RequestResponseCycle.__init__: (
        *("self", "scope", "transport", "flow", "logger", "access_logger", "access_log", "default_headers"),
        *("message_event", "expect_100_continue", "keep_alive", "on_response"),
    ),
    RequestResponseCycle.run_asgi: ("self", "app"),
    RequestResponseCycle.send: ("self", "message"),
    RequestResponseCycle.receive: ("self",),
    WebSocketsSansIOProtocol.connection_lost: ("self", "exc"),
    WebSocketsSansIOProtocol.data_received: ("self", "data"),
    WebSocketsSansIOProtocol.handle_connect: ("self", "event"),
    WebSocketsSansIOProtocol.shutdown: ("self",),
    WebSocketsSansIOProtocol.receive: ("self",),
    WebSocketsSansIOProtocol.handle_events: ("self",),
    WebSocketsSansIOProtocol.handle_cont: ("self", "event"),
    WebSocketsSansIOProtocol.handle_parser_exception: ("self",),
    WebSocketsSansIOProtocol.send_receive_event_to_app: ("self",),
    WebSocketsSansIOProtocol.stop_keepalive: ("self",),
    FlowControl.__init__: ("self", "transport"),
    FlowControl.drain: ("self",),
    FlowControl.pause_reading: ("self",),
    FlowControl.resume_reading: ("self",),
    uvicorn.Server.main_loop: ("self",),
    uvicorn.Server.shutdown: ("self", "sockets"),
    SERVER_HANDLE_EXIT: ("self", "sig", "frame"),
    uvicorn.Server.capture_signals: ("self",),
}

SUBCLASSES = [
    (connection.HttpConnection, HttpToolsProtocol),
    (websocket_connection.WebSocketConnection, WebSocketsSansIOProtocol),
    (request_cycle.RequestCycle, RequestResponseCycle),
    (server._Server, uvicorn.Server),
]


def assigned_attributes(kind: type) -> set[str]:
    """Return the names that the methods of a class assign on `self`, and its class attributes."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    targets = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    own = {node.attr for node in targets if isinstance(node.value, ast.Name) and node.value.id == "self"}
    return own | set(vars(kind))


@pytest.mark.parametrize("kind", ATTRIBUTES, ids=lambda kind: kind.__name__)
def test_class_still_has_the_attributes_we_use(kind: type) -> None:
    missing = set(ATTRIBUTES[kind]) - assigned_attributes(kind)
    assert not missing, f"uvicorn's {kind.__name__} no longer sets {', '.join(sorted(missing))}"


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda function: function.__qualname__)
def test_method_still_has_the_signature_we_use(function: Any) -> None:
    found = tuple(inspect.signature(function).parameters)
    expected = PARAMETERS[function]
    assert found == expected, f"uvicorn changed {function.__qualname__}{found}; we rely on {expected}"


@pytest.mark.parametrize(("ours", "theirs"), SUBCLASSES, ids=lambda kind: kind.__name__)
def test_every_overridden_method_is_in_the_contract(ours: type, theirs: type) -> None:
    overridden = {name for name, value in vars(ours).items() if inspect.isfunction(value) and name in vars(theirs)} - {
        "__init__"
    }
    pinned = {function.__name__ for function in PARAMETERS if function.__qualname__.startswith(f"{theirs.__name__}.")}
    assert overridden <= pinned, f"add {overridden - pinned} of {ours.__name__} to PARAMETERS"


@pytest.mark.parametrize(("ours", "theirs"), SUBCLASSES, ids=lambda kind: kind.__name__)
def test_our_private_names_do_not_collide(ours: type, theirs: type) -> None:
    """A new private attribute of uvicorn's must not be one that a subclass already uses for something else."""
    pinned = {function.__name__ for function in PARAMETERS}
    private = {name for name in assigned_attributes(ours) if name.startswith("_") and not name.startswith("__")}
    collisions = (private & assigned_attributes(theirs)) - pinned
    assert not collisions, f"uvicorn's {theirs.__name__} now has {collisions}, which {ours.__name__} uses too"


def test_http_scope_still_has_a_copy_of_the_app_state_and_no_extensions() -> None:
    source = inspect.getsource(HttpToolsProtocol.on_message_begin)
    assert '"state": self.app_state.copy()' in source, "RequestContext is stored in scope['state'] of each request"
    assert '"extensions"' not in source, "HttpConnection replaces scope['extensions']"


def test_status_lines_are_complete() -> None:
    assert httptools_impl.STATUS_LINE[200] == b"HTTP/1.1 200 OK\r\n", "STATUS_LINE of httptools_impl has changed"
    assert set(range(100, 600)) <= httptools_impl.STATUS_LINE.keys()


def test_complaint_about_rejected_handshakes_still_has_the_filtered_text() -> None:
    source = inspect.getsource(websockets_sansio_impl)
    assert "ASGI callable returned without completing handshake" in source, "adapt `_is_relevant` in server.py"


def test_websocket_data_received_still_parses_then_handles_events() -> None:
    source = inspect.getsource(WebSocketsSansIOProtocol.data_received)
    steps = ("self.conn.receive_data(data)", "self.conn.parser_exc", "self.handle_events()")
    assert all(step in source for step in steps), "adapt `WebSocketConnection.parse_slice`"


def test_websockets_still_exposes_handshake_errors_and_parsed_frames() -> None:
    protocol = ServerProtocol()
    assert protocol.handshake_exc is None, "adapt `WebSocketConnection._receive_handshake`"
    assert protocol.events == [], "adapt `WebSocketConnection.parse_slice`"


def test_websockets_still_rejects_through_a_method_that_can_be_overridden() -> None:
    source = inspect.getsource(ServerProtocol.accept)
    assert "self.reject(" in source, "adapt `_ServerProtocol`"
    assert tuple(inspect.signature(ServerProtocol.reject).parameters) == ("self", "status", "text")


def test_compile_path_still_returns_pattern_format_and_convertors() -> None:
    pattern, path, convertors = compile_path("/a/{id:path}")
    match = pattern.match("/a/b/c")
    assert match is not None, "Starlette's compile_path has changed: adapt `Router`"
    assert (path, match.groupdict(), list(convertors)) == ("/a/{id}", {"id": "b/c"}, ["id"])
