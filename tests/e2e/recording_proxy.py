"""A proxy between a client and a server that records requests and the events of responses, and may change them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect

from tests.e2e.server import wait_for

Body = dict[str, Any]


class Exchange(msgspec.Struct):
    """A request as the client sent it, and the events of its response."""

    transport: str
    body: Body
    status: int = 101
    headers: dict[str, str] = {}
    events: list[Body] = []

    @property
    def response(self) -> Body:
        """The response object of the last event."""
        response: Body = self.events[-1]["response"]
        return response

    @property
    def text(self) -> str:
        return "".join(each["delta"] for each in self.events if each["type"] == "response.output_text.delta")


class RecordingProxy:
    """Pass requests of a client on to the server at `upstream`, with bodies changed by `rewrite`."""

    def __init__(self, upstream: str) -> None:
        self.exchanges: list[Exchange] = []
        self.rewrite: Callable[[Body], Body] = lambda body: body
        self._upstream = upstream
        routes = [
            Route("/{path:path}", self._http, methods=["GET", "POST"]),
            WebSocketRoute("/{path:path}", self._socket),
        ]
        self._server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), port=0, log_config=None))

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        """Run the proxy in a thread, and yield its URL."""
        thread = threading.Thread(target=self._server.run, daemon=True)
        thread.start()
        try:
            wait_for(lambda: self._server.started)
            port = self._server.servers[0].sockets[0].getsockname()[1]
            yield f"http://127.0.0.1:{port}"
        finally:
            self._server.should_exit = True
            thread.join(60)

    def take(self) -> list[Exchange]:
        """Return the exchanges since the last call."""
        taken, self.exchanges = self.exchanges, []
        return taken

    async def _http(self, request: Request) -> StreamingResponse:
        body = await request.body()
        exchange = None
        if request.method == "POST":
            exchange = Exchange("http", json.loads(body), events=[])
            self.exchanges.append(exchange)
            body = json.dumps(self.rewrite(exchange.body)).encode()
        client = httpx.AsyncClient(base_url=self._upstream, timeout=600)
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        sent = client.build_request(request.method, path, content=body, headers=headers)
        answer = await client.send(sent, stream=True)
        if exchange is not None:
            exchange.status, exchange.headers = answer.status_code, dict(answer.headers)
        kept = {name: value for name, value in answer.headers.items() if name == "content-type" or name[:2] == "x-"}
        return StreamingResponse(self._content(client, answer, exchange), answer.status_code, kept)

    async def _content(
        self, client: httpx.AsyncClient, answer: httpx.Response, exchange: Exchange | None
    ) -> AsyncIterator[str]:
        try:
            async for line in answer.aiter_lines():
                if exchange is not None and line.startswith("data: {"):
                    exchange.events.append(json.loads(line.removeprefix("data: ")))
                yield line + "\n"
        finally:
            await client.aclose()

    async def _socket(self, socket: WebSocket) -> None:
        await socket.accept()
        url = self._upstream.replace("http", "ws", 1) + socket.url.path
        async with connect(url, max_size=None, open_timeout=None, ping_interval=None) as upstream:
            tasks = {
                asyncio.create_task(self._requests(socket, upstream)),
                asyncio.create_task(self._events(upstream, socket)),
            }
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _requests(self, socket: WebSocket, upstream: ClientConnection) -> None:
        with contextlib.suppress(WebSocketDisconnect):
            while True:
                exchange = Exchange("websocket", json.loads(await socket.receive_text()), events=[])
                self.exchanges.append(exchange)
                await upstream.send(json.dumps(self.rewrite(exchange.body)))

    async def _events(self, upstream: ClientConnection, socket: WebSocket) -> None:
        async for message in upstream:
            self.exchanges[-1].events.append(json.loads(message))
            await socket.send_text(str(message))
