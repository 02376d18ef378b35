"""An MCP server on a loopback port, and an engine with a script for each request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from mcp.server.mcpserver import MCPServer
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import ToolAnnotations
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from syringa.types import EngineRequest
from tests.fake_engine import END, FakeEngine

LABEL = "dice"


class DiceServer:
    """A server with tools that work, fail, hang and answer too much. It records what the current test sends to it."""

    def __init__(self) -> None:
        self.port = 0
        self._tests = 0
        self.begin_test()
        server = MCPServer("dice", log_level="CRITICAL")

        @server.tool(annotations=ToolAnnotations(read_only_hint=True))
        def roll(sides: int) -> str:
            """Roll a die."""
            self.calls.append(("roll", sides))
            return f"rolled {sides}"

        @server.tool()
        def fail() -> str:
            self.calls.append(("fail", None))
            raise ValueError("the die is lost")

        @server.tool()
        async def hang() -> str:
            cancelled = self.cancelled
            self.hanging.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()
            return ""

        @server.tool()
        def much(size: int) -> str:
            return "x" * size

        any_host = TransportSecuritySettings(enable_dns_rebinding_protection=False)
        self._app = server.streamable_http_app(transport_security=any_host)

    def begin_test(self) -> None:
        """Forget what was recorded, and do not record what earlier tests still send."""
        self._tests += 1
        self.calls: list[tuple[str, Any]] = []
        self.methods: list[str] = []  # of all messages
        self.headers: list[dict[str, str]] = []
        self.hanging, self.cancelled = threading.Event(), threading.Event()
        self.refuse_with: int | None = None  # an HTTP status
        self.silent = False  # whether it does not answer any more
        self.legacy = False  # whether it knows versions of MCP with a handshake only

    @property
    def url(self) -> str:
        return f"http://{self.host}/mcp?token={self.token}"

    @property
    def token(self) -> str:
        return f"in-the-url-{self._tests}"

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    def tool(self, **fields: Any) -> dict[str, Any]:
        """Return the tool of a request."""
        return {
            "type": "mcp",
            "server_label": LABEL,
            "server_url": self.url,
            "require_approval": "never",
            **fields,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.token.encode() not in scope["query_string"]:
            await self._app(scope, receive, send)
            return
        if scope["path"] == "/old":
            await RedirectResponse(self.url.removeprefix(f"http://{self.host}"), 307)(scope, receive, send)
            return
        self.headers.append(dict(Request(scope).headers))
        if self.silent:
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        if self.refuse_with is not None:
            await send({"type": "http.response.start", "status": self.refuse_with, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return

        if scope["method"] != "POST":
            self.methods.append(scope["method"])
            await self._app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        method = json.loads(body)["method"]
        self.methods.append(method)
        if self.legacy and method == "server/discover":
            await Response(status_code=400)(scope, receive, send)
            return
        sent = False

        async def replay() -> Any:
            nonlocal sent
            if sent:
                return await receive()
            sent = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


@contextlib.contextmanager
def serving(app: ASGIApp, certificate: Path | None = None) -> Iterator[int]:
    """Serve an app on a free port, in a thread of its own, and yield the port. With a `certificate`, over TLS."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, ssl_certfile=certificate))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextlib.contextmanager
def dice_server(certificate: Path | None = None) -> Iterator[DiceServer]:
    dice = DiceServer()
    with serving(dice, certificate) as dice.port:
        yield dice


class ScriptedEngine(FakeEngine):
    """Answers the first request with the first script, and so on; the last script repeats."""

    def __init__(self, scripts: Sequence[str]) -> None:
        super().__init__(scripts[-1])
        self._scripts = [script.encode() for script in scripts]

    def output_tokens(self, request: EngineRequest, choice: int) -> list[int]:
        number = min(len(self.requests), len(self._scripts)) - 1
        return [*self._scripts[number], END][: request.stopping.max_tokens]

    def prompt(self, index: int = -1) -> str:
        return bytes(self.requests[index].prompt).decode()


def call(name: str, label: str | None = LABEL, **arguments: Any) -> str:
    """Return the text with which a model calls a tool."""
    name = name if label is None else f"{label}.{name}"
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
