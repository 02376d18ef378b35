"""Lilac's examples of chat with the official package: only the URL, the key and the model differ.

Most set no seed, so the text varies, but not the format.
"""

from __future__ import annotations

import ast
import json
import subprocess
from pathlib import Path

import jsonschema
import pytest

from tests.e2e import lilac_chat
from tests.e2e.conftest import KEY, MODEL
from tests.e2e.sdk import OPENAI_PYTHON, python_with
from tests.e2e.server import Server

pytestmark = pytest.mark.model

WHOLE = "\nprint('ANSWER', response.model_dump_json())\n"


@pytest.fixture(scope="module")
def python() -> Path:
    return python_with(*OPENAI_PYTHON)


def run(python: Path, server: Server, example: str) -> subprocess.CompletedProcess[str]:
    code = lilac_chat.CLIENT + example
    for theirs, ours in {
        "https://api.getlilac.com/v1": server.url + "/v1",
        "your-lilac-api-key": KEY,
        "moonshotai/kimi-k2.5": MODEL,
    }.items():
        assert code.count(theirs) == 1
        code = code.replace(theirs, ours)
    return subprocess.run([str(python), "-c", code], capture_output=True, text=True, timeout=600)


def answer(python: Path, server: Server, example: str) -> dict[str, object]:
    """Return the choice of the response of an example."""
    return only_choice(run(python, server, example + WHOLE))


def only_choice(result: subprocess.CompletedProcess[str]) -> dict[str, object]:
    """Return the choice that the code appended to the example prints as the last line."""
    assert result.returncode == 0, result.stderr
    last = result.stdout.rstrip("\n").rpartition("\n")[2]
    (choice,) = json.loads(last.removeprefix("ANSWER "))["choices"]
    assert isinstance(choice, dict)
    return choice


def test_lilac_chat_basic_example(python: Path, shared_server: Server) -> None:
    result = run(python, shared_server, lilac_chat.BASIC)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_lilac_chat_disable_reasoning_example(python: Path, shared_server: Server) -> None:
    message = answer(python, shared_server, lilac_chat.DISABLE_REASONING)["message"]
    assert isinstance(message, dict)
    assert message["content"]
    assert "reasoning" not in message


def test_lilac_chat_streaming_example(python: Path, shared_server: Server) -> None:
    result = run(python, shared_server, lilac_chat.STREAMING)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_lilac_chat_vision_example(python: Path, shared_server: Server) -> None:
    """The model supports no images, which is an error."""
    result = run(python, shared_server, lilac_chat.VISION)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("openai.BadRequestError: ")
    assert "400" in last
    assert "messages[0].content[1]" in last
    assert "images" in last


def test_lilac_chat_tool_calling_example(python: Path, shared_server: Server) -> None:
    """The call is not required. At temperature 1, the model sometimes answers in words, and the example fails."""
    greedy = lilac_chat.TOOL_CALLING.replace("tools=[", "temperature=0, tools=[", 1)
    result = run(python, shared_server, greedy + WHOLE)
    choice = only_choice(result)
    name, arguments = result.stdout.split("\n")[:2]
    assert name == "get_weather"
    if choice["finish_reason"] == "tool_calls":  # the length of the text is not limited
        assert json.loads(arguments).keys() == {"location"}
    else:
        assert choice["finish_reason"] == "length"


def test_lilac_chat_structured_output_example(python: Path, shared_server: Server) -> None:
    choice = answer(python, shared_server, lilac_chat.STRUCTURED_OUTPUT)
    message = choice["message"]
    assert isinstance(message, dict)
    assert message["content"].startswith("{")
    if choice["finish_reason"] == "stop":  # the list is not limited, and a small model may fill the context
        (call,) = [node for node in ast.walk(ast.parse(lilac_chat.STRUCTURED_OUTPUT)) if isinstance(node, ast.Call)]
        (asked,) = [keyword.value for keyword in call.keywords if keyword.arg == "response_format"]
        jsonschema.validate(json.loads(message["content"]), ast.literal_eval(asked)["json_schema"]["schema"])
    else:
        assert choice["finish_reason"] == "length"
