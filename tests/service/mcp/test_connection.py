"""Connections to MCP servers that do not answer as they should, or not at all."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp_types import CallToolResult, ImageContent, TextContent
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from syringa.errors import FailedDependency, InvalidRequest
from syringa.remote_tools import RemoteServer
from syringa.service.mcp import client as client_module
from syringa.service.mcp import connection as module
from syringa.service.mcp.client import McpClient
from tests.client import eventually
from tests.mcp_server import DiceServer, dice_server, serving
from tests.network import certificate, patch_resolver


@pytest.fixture(scope="module")
def shared_dice() -> Iterator[DiceServer]:
    with dice_server() as dice:
        yield dice


@pytest.fixture
def dice(shared_dice: DiceServer) -> DiceServer:
    shared_dice.begin_test()
    return shared_dice


@pytest.fixture
async def client() -> AsyncIterator[McpClient]:
    client = McpClient(["127.0.0.1"], timeout=60.0, max_bytes=100_000)
    yield client
    await client.close()


def server(url: str) -> RemoteServer:
    return RemoteServer(label="x", url=url)


async def failure(client: McpClient, url: str) -> FailedDependency:
    with pytest.raises(FailedDependency) as caught:
        await client.list_tools(server(url), "tools[0]")
    assert (caught.value.status, caught.value.param) == (424, "tools[0]")
    return caught.value


async def failure_of(client: McpClient, app: ASGIApp) -> FailedDependency:
    with serving(app) as port:
        return await failure(client, f"http://127.0.0.1:{port}/mcp")


async def test_client_lists_tools_with_their_annotations(dice: DiceServer, client: McpClient) -> None:
    tools = await client.list_tools(server(dice.url), "tools[0]")
    assert [(tool.name, tool.read_only) for tool in tools] == [
        ("roll", True), ("fail", False), ("hang", False), ("much", False),
    ]  # fmt: skip
    assert tools[0].description == "Roll a die."
    assert tools[0].input_schema["required"] == ["sides"]


async def test_connection_is_kept_for_several_calls(dice: DiceServer, client: McpClient) -> None:
    connection = client.connect(server(dice.url))
    for sides in (6, 20):
        assert (await connection.call_tool("roll", {"sides": sides})).output == f"rolled {sides}"
    assert dice.calls == [("roll", 6), ("roll", 20)]
    assert dice.methods.count("server/discover") == 1
    connection.close()


async def test_connection_to_a_server_with_sessions(dice: DiceServer, client: McpClient) -> None:
    dice.legacy = True
    connection = client.connect(server(dice.url))
    for sides in (6, 20):
        assert (await connection.call_tool("roll", {"sides": sides})).output == f"rolled {sides}"
    assert dice.methods.count("initialize") == 1
    waiting = asyncio.create_task(connection.call_tool("hang", {}))
    assert await eventually(dice.hanging.is_set)
    waiting.cancel()
    connection.close()
    assert await eventually(dice.cancelled.is_set)
    assert await eventually(lambda: "DELETE" in dice.methods)


async def test_wrong_arguments_and_unknown_tools_are_errors_of_the_call(dice: DiceServer, client: McpClient) -> None:
    connection = client.connect(server(dice.url))
    for name, arguments in (("roll", {"sides": "many"}), ("roll", {}), ("nothing", {})):
        result = await connection.call_tool(name, arguments)
        assert (result.output, (result.error or {})["type"]) == (None, "mcp_tool_execution_error")
        assert name in result.text
    assert (await connection.call_tool("roll", {"sides": 6})).output == "rolled 6"
    connection.close()


async def test_connection_works_after_a_result_that_was_too_large(dice: DiceServer, client: McpClient) -> None:
    connection = client.connect(server(dice.url))
    result = await connection.call_tool("much", {"size": 200_000})
    assert (result.error or {})["message"] == "its answer has more than 100000 bytes (mcp_max_bytes)"
    assert len((await connection.call_tool("much", {"size": 40_000})).output or "") == 40_000
    connection.close()


async def test_call_that_hangs_is_cancelled_after_the_timeout(dice: DiceServer) -> None:
    client = McpClient(["127.0.0.1"], timeout=2.5, max_bytes=100_000)
    connection = client.connect(server(dice.url))
    result = await connection.call_tool("hang", {})
    assert (result.error or {})["code"] == 504
    assert "took longer than 2.5 seconds" in result.text
    await client.close()


async def test_connection_opens_a_new_session_after_a_cancelled_call(dice: DiceServer, client: McpClient) -> None:
    connection = client.connect(server(dice.url))
    waiting = asyncio.create_task(connection.call_tool("hang", {}))
    assert await eventually(dice.hanging.is_set)
    waiting.cancel()
    connection.close()
    assert await eventually(dice.cancelled.is_set)
    assert (await connection.call_tool("roll", {"sides": 6})).output == "rolled 6"
    connection.close()


async def test_closing_the_client_ends_all_tasks(dice: DiceServer, client: McpClient) -> None:
    connections = [client.connect(server(dice.url)) for _ in range(3)]
    waiting = [asyncio.create_task(each.call_tool("hang", {})) for each in connections]
    assert await eventually(dice.hanging.is_set)
    before = len(asyncio.all_tasks())
    await client.close()
    results = await asyncio.gather(*waiting)
    assert all(result.error is not None for result in results)
    assert len(asyncio.all_tasks()) < before


async def test_closing_the_client_does_not_wait_for_a_server_that_hangs(
    dice: DiceServer, client: McpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "_CLOSE_SECONDS", 0.05)
    dice.legacy = True
    connection = client.connect(server(dice.url))
    assert (await connection.call_tool("roll", {"sides": 6})).output == "rolled 6"
    dice.silent = True  # does not answer to the end of the session
    await client.close()
    assert client._tasks == set()


async def test_server_that_is_down_is_reported(client: McpClient) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        error = await failure(client, f"http://127.0.0.1:{closed.getsockname()[1]}/mcp")
    assert "no connection to it could be made" in error.message


async def test_server_that_never_answers_is_reported() -> None:
    client = McpClient(["127.0.0.1"], timeout=0.3, max_bytes=1000)
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, and says nothing
        error = await failure(client, f"http://127.0.0.1:{listener.getsockname()[1]}/mcp")
    assert "took longer than 0.3 seconds" in error.message
    await client.close()


@pytest.mark.parametrize(
    "answer",
    [
        Response("<html>", media_type="text/html"),
        Response("{}", media_type="application/json"),
        Response("not JSON", media_type="application/json"),
        Response("[" * 50_000, media_type="application/json"),
        Response("data: nothing\n\n", media_type="text/event-stream"),
        Response(status_code=202),
        Response(gzip.compress(b"{}"), media_type="application/json", headers={"content-encoding": "gzip"}),
    ],
    ids=["html", "object", "text", "nested", "event", "accepted", "compressed"],
)
async def test_server_that_does_not_speak_mcp_is_reported(client: McpClient, answer: Response) -> None:
    error = await failure_of(client, answer)
    assert error.message.startswith("The MCP server 'x' failed: ")
    assert "Traceback" not in error.message


async def test_answer_that_is_not_a_list_of_tools_is_reported(client: McpClient) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            message = await Request(scope, receive).json()
            result = {"tools": 7, "protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": 7}
            body = {"jsonrpc": "2.0", "id": message["id"], "result": result}
            await Response(json.dumps(body), media_type="application/json")(scope, receive, send)

    assert "not a valid MCP message" in (await failure_of(client, app)).message


async def test_answer_without_end_is_reported(client: McpClient) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        while True:
            await send({"type": "http.response.body", "body": b" " * 10_000, "more_body": True})
            await asyncio.sleep(0)

    error = await failure_of(client, app)
    assert "more than 100000 bytes (mcp_max_bytes)" in error.message


async def test_redirect_to_another_host_is_not_followed(dice: DiceServer, client: McpClient) -> None:
    error = await failure_of(client, RedirectResponse(dice.url, 307))
    assert error.message == "The MCP server 'x' failed: it answered with the HTTP status 307."
    assert dice.headers == []


async def test_redirect_within_the_host_is_followed(dice: DiceServer, client: McpClient) -> None:
    tools = await client.list_tools(server(f"http://{dice.host}/old?token={dice.token}"), "tools[0]")
    assert len(tools) == 4


async def test_host_is_resolved_and_checked_for_every_request(
    dice: DiceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that changes to a forbidden address after the first request is refused."""
    answers = iter(["127.0.0.1", "169.254.169.254"])

    def getaddrinfo(host: str, port: Any, *args: Any, **kwargs: Any) -> list[Any]:
        address = host if host == "127.0.0.1" else next(answers, "169.254.169.254")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    client = McpClient(["dice.test"], timeout=60.0, max_bytes=100_000)
    error = await failure(client, f"http://dice.test:{dice.port}/mcp?token={dice.token}")
    assert "no address that may be connected to" in error.message
    assert [headers["host"] for headers in dice.headers] == [f"dice.test:{dice.port}"]
    await client.close()


async def test_connection_verifies_the_certificate_of_the_host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = certificate(tmp_path, "dice.test")
    patch_resolver(monkeypatch, {"dice.test": ["127.0.0.1"], "other.test": ["127.0.0.1"], "127.0.0.1": ["127.0.0.1"]})
    monkeypatch.setattr(module, "ssl_context", lambda: ssl.create_default_context(cafile=str(file)))
    client = McpClient(["dice.test", "other.test"], timeout=60.0, max_bytes=100_000)
    with dice_server(file) as dice:
        tools = await client.list_tools(server(f"https://dice.test:{dice.port}/mcp"), "tools[0]")
        assert len(tools) == 4
        error = await failure(client, f"https://other.test:{dice.port}/mcp")
        assert "no connection to it could be made" in error.message
    await client.close()


async def test_private_address_of_a_host_that_is_not_listed_is_refused(
    dice: DiceServer,
) -> None:
    client = McpClient(["*"], timeout=60.0, max_bytes=100_000)
    for host in ("127.0.0.1", "localhost"):
        error = await failure(client, f"http://{host}:{dice.port}/mcp?token={dice.token}")
        assert "no address that may be connected to" in error.message
    assert dice.headers == []
    await client.close()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1/mcp", "ftp://127.0.0.1/mcp", "http:///mcp", "http://u:p@127.0.0.1/mcp", "http://[::1/mcp",
            "http://127.0.0.1:99999/mcp", "http://\x00/"],
)  # fmt: skip
async def test_invalid_url_is_refused(client: McpClient, url: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await client.check_url(url, "tools[0].server_url")
    assert caught.value.param == "tools[0].server_url"


class PagedClient:
    def __init__(self, pages: int) -> None:
        self._pages = pages

    async def list_tools(self, cursor: str | None) -> Any:
        from mcp_types import ListToolsResult, Tool

        page = int(cursor or 0)
        tool = Tool(name=f"tool{page}", input_schema={"type": "object"})
        return ListToolsResult(tools=[tool], next_cursor=str(page + 1) if page + 1 < self._pages else None)


async def test_all_pages_of_a_list_are_read() -> None:
    pages: Any = PagedClient(3)
    assert [tool.name for tool in await module._list_tools(pages)] == ["tool0", "tool1", "tool2"]
    endless: Any = PagedClient(10**6)
    with pytest.raises(ValueError, match="more than 16 pages"):
        await module._list_tools(endless)


def test_result_has_the_text_of_all_content() -> None:
    image = ImageContent(type="image", data="AAAA", mime_type="image/png")
    content = [TextContent(type="text", text="one"), image, TextContent(type="text", text="two \ud800")]
    assert module._to_result(CallToolResult(content=content)).output == "one\n[image, image/png]\ntwo ?"
    assert module._to_result(CallToolResult(content=[], structured_content={"é": 1})).output == json.dumps(
        {"é": 1}, ensure_ascii=False
    )
    failed = module._to_result(CallToolResult(content=[], is_error=True))
    assert failed.text == "Error: the tool has failed"
