"""Claude Code against `syringa serve`, on the real model: `CLAUDE_CODE=1 pytest tests/e2e/test_claude_code.py`.

It downloads a binary of 245 MB, and runs with that in an environment of its own. A small model neither ends its texts
nor calls tools as told, and what it calls would be executed: a proxy ends each text after a few tokens, forbids calls,
and requires a certain call where a test needs one.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.recording_proxy import Body, Exchange, RecordingProxy
from tests.e2e.sdk import CLAUDE_CODE, node_with
from tests.e2e.server import Server, serve

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("CLAUDE_CODE"), reason="set CLAUDE_CODE=1 to download and run Claude Code"),
]

END_TOKEN = 2
COMMAND = "printf %s-%s round trip"
SYSTEM = "You are a helpful assistant."
STRICT = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('a late system message') }}{% endif %}
{{- '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


class ClaudeCode:
    """Claude Code with a configuration and a history of its own."""

    def __init__(self, folder: Path, url: str) -> None:
        _, packages = node_with(*CLAUDE_CODE)
        self._command = str(packages / "node_modules" / ".bin" / "claude")
        self._project = folder / "project"
        self._project.mkdir()
        self._environment = {
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin",
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": "dummy",
            "ANTHROPIC_MODEL": "claude-sonnet-4-5",  # an alias of the model
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "256",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }

    def turn(self, prompt: str) -> Body:
        """Run a turn, and return the result that Claude Code reports."""
        options = ["--tools", "Bash", "--allowedTools", "Bash", "--system-prompt", SYSTEM, "--output-format", "json"]
        result = subprocess.run(
            [self._command, "-p", prompt, *options], cwd=self._project, env=self._environment,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert result.returncode == 0, (result.stdout, result.stderr)
        found: Body = json.loads(result.stdout)
        return found


@pytest.fixture(scope="module", params=["own", "strict"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose chat template is the model's own, or one that refuses system messages after others."""
    template: tuple[str, ...] = ()
    if request.param == "strict":
        file = tmp_path_factory.mktemp("template") / "strict.jinja"
        file.write_text(STRICT)
        template = ("--chat-template", str(file))
    with serve("--served-model-name", MODEL, "--served-model-name", "claude-*", *template) as server:
        yield server


@pytest.fixture
def proxy(server: Server) -> RecordingProxy:
    return RecordingProxy(server.url)


def answer_briefly(body: Body) -> Body:
    """Make the model write a text of eight tokens, whatever they are."""
    ending = {"min_tokens": 8, "logit_bias": {str(END_TOKEN): 100}, "temperature": 0}
    return body | ending | ({"tool_choice": {"type": "none"}} if body.get("tools") else {})


def call_bash_once() -> Callable[[Body], Body]:
    """Make the model call Bash with a harmless command, and then write a text."""

    def rewrite(body: Body) -> Body:
        results = [block for message in body["messages"] for block in blocks(message) if block["type"] == "tool_result"]
        if results or not body.get("tools"):
            return answer_briefly(body)
        tool = next(each for each in body["tools"] if each["name"] == "Bash")
        schema = {
            "type": "object",
            "properties": {"command": {"enum": [COMMAND]}},
            "required": ["command"],
            "additionalProperties": False,
        }
        choice = {"type": "tool", "name": "Bash", "disable_parallel_tool_use": True}
        return body | {"tools": [tool | {"input_schema": schema}], "tool_choice": choice, "temperature": 0}

    return rewrite


def blocks(message: Body) -> list[Body]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def text_of(exchange: Exchange) -> str:
    deltas = [event["delta"] for event in exchange.events if event["type"] == "content_block_delta"]
    return "".join(delta["text"] for delta in deltas if delta["type"] == "text_delta")


def messages_of(proxy: RecordingProxy) -> list[Exchange]:
    """Return the streamed messages, all of which must be complete."""
    exchanges = [each for each in proxy.take() if "max_tokens" in each.body]
    for each in exchanges:
        assert (each.status, each.events[-1]["type"]) == (200, "message_stop"), (each.status, each.events)
    return exchanges


def test_claude_code_answers_and_calls_a_tool(proxy: RecordingProxy, tmp_path: Path) -> None:
    with proxy.running() as url:
        claude = ClaudeCode(tmp_path, url)
        proxy.rewrite = answer_briefly
        result = claude.turn("Say hello.")
        assert not result["is_error"]
        answered = messages_of(proxy)[-1]
        assert result["result"] == text_of(answered).strip() != ""

        proxy.rewrite = call_bash_once()
        result = claude.turn("Run the command.")
        assert not result["is_error"]
        called, answered = [each for each in messages_of(proxy) if each.body.get("tools")]
        assert called.events[-2]["delta"]["stop_reason"] == "tool_use"
        (output,) = [block for block in blocks(answered.body["messages"][-1]) if block["type"] == "tool_result"]
        assert "round-trip" in json.dumps(output["content"])
        assert result["result"] == text_of(answered).strip() != ""
