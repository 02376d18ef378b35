"""OpenAI's Codex CLI against `syringa serve`, on the real model.

Codex is configured with the address of the server, the model and its context length, and nothing else. A small model
neither ends its texts nor calls tools as told, and what it calls would be executed: a proxy ends each text after a few
tokens, forbids calls, and requires a certain call where a test needs one.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.recording_proxy import Body, Exchange, RecordingProxy
from tests.e2e.sdk import CODEX, node_with
from tests.e2e.server import Server, serve

pytestmark = [pytest.mark.model, pytest.mark.slow]

CONTEXT = 8192  # tokens; Codex describes itself and its tools in 8,700 unless the tools are described in short
END_TOKEN = 2
# Names of models that Codex knows: for the first it searches for tools, for the second it has code call them.
SEARCHING, CODING = KNOWN_MODELS = ("gpt-5.5", "gpt-5.6-luna")
COMMAND = "printf %s-%s round trip"
CODE = "text(6 * 7)"
ARGUMENTS: dict[str, Body] = {
    "exec_command": {"cmd": COMMAND},
    "lookup": {"number": 7},
    "tool_search": {"query": "look up the word of a number"},
}
LOOKUP = {"type": "function", "name": "lookup", "namespace": "mcp__words"}
MCP_SERVER = Path(__file__).with_name("mcp_stdio_server.py")
CONFIG = """
model = "{model}"
model_provider = "syringa"
model_context_window = {context}

[model_providers.syringa]
name = "Syringa"
base_url = "{url}/v1"
wire_api = "responses"
supports_websockets = {websockets}
"""
CONFIG_MCP = """
[mcp_servers.words]
command = "{python}"
args = ["{script}"]
"""


class Codex:
    """Codex with a configuration and a history of its own."""

    def __init__(self, folder: Path, url: str, transport: str, *, model: str = MODEL, mcp: bool = False) -> None:
        node, packages = node_with(*CODEX)
        self._command = [node, str(packages / "node_modules" / "@openai" / "codex" / "bin" / "codex.js")]
        self._home, self._project = folder / "home", folder / "project"
        self._home.mkdir()
        self._project.mkdir()
        websockets = str(transport == "websocket").lower()
        config = CONFIG.format(model=model, context=CONTEXT, url=url, websockets=websockets)
        if mcp:
            config += CONFIG_MCP.format(python=sys.executable, script=MCP_SERVER)
        (self._home / "config.toml").write_text(config)
        self._thread: str | None = None

    def turn(self, prompt: str) -> list[Body]:
        """Run a turn of the thread, and return the events that Codex reports."""
        resume = ["resume", self._thread] if self._thread else []
        command = [*self._command, "exec", *resume, "--skip-git-repo-check", "--json", prompt]
        environment = {"CODEX_HOME": str(self._home), "HOME": str(self._home), "PATH": "/usr/bin:/bin"}
        result = subprocess.run(
            command, cwd=self._project, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip
        events: list[Body] = [json.loads(line) for line in result.stdout.splitlines()]
        assert result.returncode == 0, (events, result.stderr)
        assert events[0]["type"] == "thread.started"
        self._thread = events[0]["thread_id"]
        return events


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    names = [part for name in (MODEL, *KNOWN_MODELS) for part in ("--served-model-name", name)]
    with serve(*names) as server:
        yield server


@pytest.fixture
def proxy(server: Server) -> RecordingProxy:
    return RecordingProxy(server.url)


def answer_briefly(body: Body) -> Body:
    """Make the model write a text of eight tokens, whatever they are."""
    end = {"min_tokens": 8, "logit_bias": {str(END_TOKEN): 100}}
    return with_fixed_input(body) | end | {"temperature": 0, "tool_choice": "none"}


def choose(*choices: Body) -> Callable[[Body], Body]:
    """Make the model call some tools, one after the other, and then write a text."""
    rest = list(choices)

    def rewrite(body: Body) -> Body:
        if body.get("generate") is False or not rest:
            return answer_briefly(body)
        choice = {"type": "allowed_tools", "mode": "required", "tools": [rest.pop(0)]}
        return with_fixed_input(body) | {"temperature": 0, "tool_choice": choice, "parallel_tool_calls": False}

    return rewrite


def with_fixed_input(body: Body) -> Body:
    """Allow one input of each tool that a test calls: a harmless one, where a small model would not end."""
    changed: Body = json.loads(json.dumps(body))
    groups = [changed.get("tools", []), *(each["tools"] for each in changed["input"] if "tools" in each)]
    tools = [tool for group in groups for each in group for tool in (each, *each.get("tools", []))]
    for tool in tools:
        name = tool.get("name", tool["type"])
        if name == "exec":
            tool["format"] = {"type": "grammar", "syntax": "regex", "definition": re.escape(CODE)}
        elif name in ARGUMENTS:
            properties = {key: {"enum": [value]} for key, value in ARGUMENTS[name].items()}
            tool["parameters"] |= {"properties": properties, "required": list(properties)}
    return changed


def items(events: list[Body], kind: str) -> list[Body]:
    return [each["item"] for each in events if each["type"] == "item.completed" and each["item"]["type"] == kind]


def generated(exchanges: list[Exchange], transport: str) -> list[Exchange]:
    """Check that all responses are complete, and return those with output: the first over a WebSocket has none."""
    for each in exchanges:
        assert (each.transport, each.status) == (transport, 101 if transport == "websocket" else 200)
        assert each.events[-1]["type"] == "response.completed", each.events[-1]
    return [each for each in exchanges if each.body.get("generate") is not False]


def output_of(called: Exchange, following: Exchange, transport: str, **expected: str | None) -> Body:
    """Check the call of a response, and that its output is in the following request, which is returned."""
    (call,) = called.response["output"]
    assert {name: call.get(name) for name in expected} == expected
    output: Body = following.body["input"][-1]
    kind = "tool_search_output" if call["type"] == "tool_search_call" else call["type"] + "_output"
    assert (output["type"], output["call_id"]) == (kind, call["call_id"])
    if transport == "websocket":  # only new items are sent
        assert following.body["previous_response_id"] == called.response["id"]
        assert len(following.body["input"]) == 1
    return output


@pytest.mark.parametrize("mcp", [False, True], ids=["", "mcp"])
@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_codex_responds_calls_tools_and_continues(
    proxy: RecordingProxy, tmp_path: Path, transport: str, mcp: bool
) -> None:
    with proxy.running() as url:
        codex = Codex(tmp_path, url, transport, mcp=mcp)

        # A turn.
        proxy.rewrite = answer_briefly
        events = codex.turn("Say hello.")
        (first,) = generated(proxy.take(), transport)
        assert first.text
        assert [each["text"] for each in items(events, "agent_message")] == [first.text]
        usage = first.response["usage"]
        reported = events[-1]["usage"]
        assert (reported["input_tokens"], reported["output_tokens"]) == (usage["input_tokens"], usage["output_tokens"])

        # A tool call, its execution and the answer to its result.
        proxy.rewrite = choose({"type": "function", "name": "exec_command"})
        events = codex.turn("Run the command.")
        called, answered = generated(proxy.take(), transport)
        output = output_of(called, answered, transport, type="function_call", namespace=None, name="exec_command")
        (executed,) = items(events, "command_execution")
        assert COMMAND in executed["command"]
        assert executed["aggregated_output"] in output["output"]
        assert [each["text"] for each in items(events, "agent_message")] == [answered.text]

        if mcp:
            proxy.rewrite = choose(LOOKUP)
            events = codex.turn("Look up a number.")
            called, answered = generated(proxy.take(), transport)
            output = output_of(called, answered, transport, namespace="mcp__words", name="lookup")
            check_lookup(events, output)

        # A turn that continues the thread, with the calls in its history.
        proxy.rewrite = answer_briefly
        events = codex.turn("Thank you.")
        (last,) = generated(proxy.take(), transport)
        assert [each["text"] for each in items(events, "agent_message")] == [last.text]
        kinds = [each["type"] for each in last.body["input"]]
        assert kinds.count("function_call") == kinds.count("function_call_output") == 1 + mcp
        assert last.response["usage"]["input_tokens"] > usage["input_tokens"]


def check_lookup(events: list[Body], output: Body) -> None:
    (executed,) = items(events, "mcp_tool_call")
    assert (executed["server"], executed["tool"], executed["status"]) == ("words", "lookup", "completed")
    assert "word-7" in json.dumps(output["output"])


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_codex_searches_for_tools(proxy: RecordingProxy, tmp_path: Path, transport: str) -> None:
    with proxy.running() as url:
        codex = Codex(tmp_path, url, transport, model=SEARCHING, mcp=True)
        proxy.rewrite = choose({"type": "tool_search"}, LOOKUP)
        events = codex.turn("Look up a number.")
    searched, called, answered = generated(proxy.take(), transport)
    found = output_of(searched, called, transport, type="tool_search_call", execution="client")
    assert "mcp__words" in [each["name"] for each in found["tools"]]
    check_lookup(events, output_of(called, answered, transport, namespace="mcp__words", name="lookup"))
    assert [each["text"] for each in items(events, "agent_message")] == [answered.text]


@pytest.mark.parametrize("transport", ["http", "websocket"])
def test_codex_runs_code(proxy: RecordingProxy, tmp_path: Path, transport: str) -> None:
    with proxy.running() as url:
        codex = Codex(tmp_path, url, transport, model=CODING)
        proxy.rewrite = choose({"type": "custom", "name": "exec", "namespace": "functions"})
        events = codex.turn("Run the code.")
    called, answered = generated(proxy.take(), transport)
    output = output_of(called, answered, transport, type="custom_tool_call", name="exec", input=CODE)
    assert "42" in json.dumps(output["output"])
    assert [each["text"] for each in items(events, "agent_message")] == [answered.text]
