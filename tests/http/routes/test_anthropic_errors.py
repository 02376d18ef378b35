"""Errors of `/v1/messages`: what is refused, with which type, and in Anthropic's envelope on every path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.api.models.served_model import FixedModels
from syringa.config import Config
from syringa.engine.interface import SingleEngineProvider
from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.http.app import create_app
from syringa.service.app_state import AppState
from tests.chat_models import plain_model, tool_model
from tests.client import settle
from tests.fake_engine import FakeEngine
from tests.http.anthropic_client import CALLED, IMAGE, PATH, TOOL, anthropic_client, check_error, parse_stream
from tests.http.fake_transport import create_connection


def _content(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_tokens": None}, "max_tokens: object missing required field max_tokens."),
        ({"max_tokens": -1}, "max_tokens: expected int >= 0."),
        ({"messages": []}, "messages: expected array of length >= 1."),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: invalid enum value 'tool'."),
        ({"messages": [{"role": "user"}]}, "messages[0].content: expected a string or an array of blocks."),
        (_content(), "messages[0].content: only the last message of the assistant may be empty."),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages: expected a message with content."),
        (_content("x"), "messages[0].content[0]: expected a block with a type."),
        (_content({"type": "text"}), "messages[0].content[0]: object missing required field text."),
        (_content({"type": "video"}), "messages[0].content[0].type: supported blocks of user messages are"),
        (_content(CALLED), "messages[0].content[0].type: supported blocks of user messages are"),
        (_content(IMAGE, role="assistant"), "messages[0].content[0].type: supported blocks of assistant messages"),
        (_content(CALLED, role="assistant"), "messages: the last message has tool_use blocks"),
        (
            _content({"type": "tool_result", "tool_use_id": "x"}),
            "messages[0].content[0].tool_use_id: no earlier message has a tool_use block 'x'.",
        ),
        (
            _content({"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": ""}}),
            "messages[0].content[0].source.type: documents of type text and content are supported",
        ),
        (
            _content({"type": "image", "source": {"type": "file", "file_id": "f"}}),
            "messages[0].content[0].source.type: expected base64 or url, not 'file'.",
        ),
        (
            _content({"type": "text", "text": "x", "cache_control": {"type": "forever"}}),
            "messages[0].content[0].cache_control.type: invalid enum value 'forever'.",
        ),
        (
            _content({"type": "thinking", "thinking": "x", "signature": "s"}, role="assistant"),
            "messages[0].content[0].signature: invalid: the block was not made by this server",
        ),
        ({"system": 5}, "system: expected a string or an array of text blocks."),
        ({"system": [IMAGE]}, "system[0].type: expected text, not 'image'."),
        ({"stop_sequences": [""]}, "stop_sequences[0]: expected str of length >= 1."),
        ({"temperature": 3}, "temperature: expected float <= 2.0."),
        ({"n": 2}, "n: a request has one message; n cannot exceed 1."),
        (
            {"thinking": {"type": "on"}},
            "thinking.type: expected enabled, adaptive, disabled or between_tools, not 'on'.",
        ),
        ({"thinking": {"type": "enabled"}}, "thinking: object missing required field budget_tokens."),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type: invalid enum value 'text'."),
        ({"output_config": {"effort": "some"}}, "output_config.effort: invalid enum value 'some'."),
        ({"tools": [{"name": "f"}]}, "tools[0]: object missing required field input_schema."),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name: expected str matching regex"),
        ({"tools": [TOOL | {"type": "function"}]}, "tools[0].type: expected custom or the type of a tool"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: duplicate tool name 'get_weather'."),
        ({"tools": [TOOL] * 513}, "tools: expected array of length <= 512."),
        (
            {"tools": [TOOL | {"input_schema": {"type": "string"}}]},
            "tools[0].input_schema.type: arguments have to be an object.",
        ),
        ({"tool_choice": {"type": "any"}}, "tool_choice requires a tool, but there are no tools."),
        (
            {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
            "tool_choice.name: no tool 'g' is offered to the model (get_weather).",
        ),
        ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "tool_choice.type: invalid enum value 'required'."),
        ({"metadata": {"user_id": 5}}, "metadata.user_id: expected str, got int."),
        ({"json_schema": {"type": "object", "$ref": "#/x"}}, "json_schema"),
    ],
)
async def test_invalid_request_is_refused_with_the_path_of_the_field(
    body: dict[str, Any], message: str, tmp_path: Path
) -> None:
    async with anthropic_client(model=tool_model(), database=str(tmp_path / "db")) as http:
        error = await http.error(400, **body)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(message), error["message"]


async def test_prompt_that_the_engine_finds_too_long_is_refused_in_words_that_clients_know() -> None:
    engine = FakeEngine("hello")
    engine.fail = InvalidRequest("The prompt has 99 tokens with its images.", code="context_length_exceeded")
    async with anthropic_client(engine) as http:
        error = await http.error(400)
        answer = await http.send_body(stream=True)
    message = "prompt is too long: The prompt has 99 tokens with its images."
    assert error == {"type": "invalid_request_error", "message": message}
    assert parse_stream(answer.text)[-1]["error"] == error


async def test_errors_have_anthropics_types(tmp_path: Path) -> None:
    async with anthropic_client(api_key=("secret",), database=str(tmp_path / "db"), max_body_bytes=500) as http:
        assert (await http.error(401))["type"] == "authentication_error"
        http.headers["x-api-key"] = "secret"
        assert (await http.create())["content"]
        assert (await http.error(404, model="none"))["type"] == "not_found_error"
        assert (await http.error(413, system="x" * 500))["type"] == "request_too_large"
        answer = await http.post(PATH, content=b"{", headers={"content-type": "application/json"})
        assert check_error(answer)["message"].startswith("The body is not valid JSON")
        http.engine.fail, http.engine.fail_first = EngineOverloaded("full"), True
        assert await http.error(503) == {"type": "overloaded_error", "message": "full"}
        http.engine.fail = ValueError("a secret")
        assert await http.error(500) == {"type": "api_error", "message": "An internal error occurred."}
        answer = await http.get(PATH)
        assert (answer.status_code, check_error(answer)["type"]) == (405, "invalid_request_error")
        answer = await http.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
        assert (answer.status_code, check_error(answer)["type"]) == (404, "not_found_error")


async def test_rate_limit_has_anthropics_error(tmp_path: Path) -> None:
    async with anthropic_client(api_key=("k",), database=str(tmp_path / "db"), requests_per_minute=1) as http:
        http.headers["x-api-key"] = "k"
        await http.create()
        answer = await http.send_body()
        assert (answer.status_code, check_error(answer)["type"]) == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("path", [f"{PATH}/batches", f"{PATH}/", f"{PATH}/count_tokens/x", f"{PATH}/batches/b/results"])
async def test_unknown_paths_below_messages_have_anthropics_error(path: str) -> None:
    async with anthropic_client() as http:
        for answer in (await http.get(path), await http.post(path, json={})):
            assert (answer.status_code, check_error(answer)["type"]) == (404, "not_found_error")
            assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_count_tokens_has_anthropics_errors(tmp_path: Path) -> None:
    path = f"{PATH}/count_tokens"
    model = tool_model(max_model_len=20)
    settings: dict[str, Any] = {"api_key": ("k",), "database": str(tmp_path / "db"), "max_body_bytes": 9000}
    async with anthropic_client(model=model, requests_per_minute=8, **settings) as http:
        assert (await http.error(401, path))["type"] == "authentication_error"
        http.headers["x-api-key"] = "k"
        assert (await http.error(404, path, model="none"))["type"] == "not_found_error"
        assert (await http.error(413, path, system="x" * 9000))["type"] == "request_too_large"
        assert (await http.error(400, path, messages=5))["message"] == "messages: expected array, got int."
        long = await http.error(400, path, messages=[{"role": "user", "content": "x" * 5000}])
        assert long["message"].startswith("prompt is too long: This model's maximum context length is 20 tokens")
        answer = await http.post(path, content=b"{}", headers={"content-type": "text/plain"})
        assert (answer.status_code, check_error(answer)["type"]) == (415, "invalid_request_error")
        answer = await http.get(path)
        assert (answer.status_code, check_error(answer)["type"]) == (405, "invalid_request_error")
        while (answer := await http.send_body(path)).status_code == 200:
            pass
        assert (answer.status_code, check_error(answer)["type"]) == (429, "rate_limit_error")


async def test_requests_that_are_late_or_from_elsewhere_have_anthropics_errors() -> None:
    async with anthropic_client(request_timeout=0.001) as http:
        http.engine.pause()
        assert (await http.error(503))["type"] == "timeout_error"
    async with anthropic_client() as http:
        answer = await http.post(PATH, json={}, headers={"origin": "http://elsewhere.example"})
        assert (answer.status_code, check_error(answer)["type"]) == (403, "permission_error")
        answer = await http.post(PATH, content=b"{}", headers={"content-type": ""})
        assert (answer.status_code, check_error(answer)["type"]) == (415, "invalid_request_error")
        http.engine.ready = False
        assert await http.error(503) == {"type": "overloaded_error", "message": "The model is loading."}


async def test_draining_server_has_anthropics_error() -> None:
    state = AppState(Config())
    state.draining = True
    async with anthropic_client(app_state=state) as http:
        answer = await http.send_body()
        assert (answer.status_code, check_error(answer)["type"]) == (503, "overloaded_error")
        assert int(answer.headers["retry-after"]) > 0


async def test_body_that_does_not_arrive_has_anthropics_error() -> None:
    """The timer is expired by hand."""
    state = AppState(Config())
    app = create_app(Config(), SingleEngineProvider(FakeEngine()), FixedModels([plain_model()]), state)
    connection, transport = create_connection(app)
    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n"
    connection.data_received(head.encode())
    await settle()
    connection._read_timed_out()
    answer, _, body = transport.text.partition(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ")
    message = "The request did not arrive in time."
    assert msgspec.json.decode(body)["error"] == {"type": "invalid_request_error", "message": message}
    connection.connection_lost(None)
    await state.close()
