"""Lilac's examples of Responses in three languages: only the URL, the key and the model differ.

They set no seed and mostly no token limit, so the text varies and may fill the context, but the format does not vary.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from tests.e2e import lilac_responses
from tests.e2e.conftest import KEY, MODEL
from tests.e2e.sdk import OPENAI_JS, OPENAI_PYTHON, node_with, python_with
from tests.e2e.server import Server
from tests.schemas import validate_openai

pytestmark = [pytest.mark.model, pytest.mark.slow]

LANGUAGES = ["python", "node", "curl"]
COLOR = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "hex": {"type": "string"}},
    "required": ["name", "hex"],
}
# Appended to an example, to print the whole response.
WHOLE = {
    "python": "\nprint('ANSWER', response.model_dump_json())\n",
    "node": "\nconsole.log('ANSWER', JSON.stringify(response));\n",
    "curl": "",
}
Answers = dict[tuple[str, str], dict[str, Any]]


def run(server: Server, language: str, example: str) -> subprocess.CompletedProcess[str]:
    code = getattr(lilac_responses, f"{language.upper()}_CLIENT", "") + example
    for theirs, ours in {
        "https://api.getlilac.com/v1": server.url + "/v1",
        "your-lilac-api-key": KEY,
        "moonshotai/kimi-k2.6": MODEL,
    }.items():
        assert code.count(theirs) == 1
        code = code.replace(theirs, ours)
    folder = None
    if language == "python":
        command = [str(python_with(*OPENAI_PYTHON)), "-"]
    elif language == "node":
        node, folder = node_with(*OPENAI_JS)
        command = [node, "--input-type=module", "-"]
    else:
        command = ["sh"]
    return subprocess.run(command, input=code, cwd=folder, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def answers(shared_server: Server) -> Answers:
    """The responses by language and subject. All run concurrently, because one response may fill the context."""
    if not shutil.which("curl"):
        pytest.skip("curl is not installed")
    python_with(*OPENAI_PYTHON)
    node_with(*OPENAI_JS)

    def ask(named: tuple[str, str]) -> dict[str, Any]:
        language, subject = named
        example = getattr(lilac_responses, f"{language}_{subject}".upper())
        result = run(shared_server, language, example + WHOLE[language])
        assert result.returncode == 0, result.stderr
        last = result.stdout.rstrip("\n").rpartition("\n")[2]
        answer: dict[str, Any] = json.loads(last.removeprefix("ANSWER "))
        return answer

    asked = [
        (language, subject)
        for language in LANGUAGES
        for subject in ("basic", "structured", "tools", "instructions")
        if hasattr(lilac_responses, f"{language}_{subject}".upper())
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        return dict(zip(asked, pool.map(ask, asked), strict=True))


def text(answer: dict[str, Any]) -> str:
    return "".join(part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"])


def ended(answer: dict[str, Any]) -> bool:
    """Return whether the response is complete. Otherwise it must be marked as incomplete."""
    assert answer["model"] == MODEL
    if answer["status"] == "completed":
        return True
    assert (answer["status"], answer["incomplete_details"]["reason"]) == ("incomplete", "max_output_tokens")
    return False


def test_every_lilac_responses_example_ran(answers: Answers) -> None:
    assert len(answers) == 11
    for subject in ("basic", "structured", "tools", "instructions"):
        validate_openai(answers["curl", subject], "Response")


@pytest.mark.parametrize("language", LANGUAGES)
def test_lilac_responses_basic_example(answers: Answers, language: str) -> None:
    answer = answers[language, "basic"]
    ended(answer)
    assert text(answer).strip()
    assert answer["usage"]["output_tokens"] > 0


@pytest.mark.parametrize("language", LANGUAGES)
def test_lilac_responses_structured_output_example(answers: Answers, language: str) -> None:
    answer = answers[language, "structured"]
    assert answer["text"]["format"]["name"] == "color"
    assert text(answer).startswith("{")
    if ended(answer):  # the strings are not limited, and a small model may fill the context
        jsonschema.validate(json.loads(text(answer)), COLOR)


def calls_in(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [item for item in answer["output"] if item["type"] == "function_call"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_lilac_responses_tools_example(answers: Answers, language: str) -> None:
    answer = answers[language, "tools"]
    assert [tool["name"] for tool in answer["tools"]] == ["get_weather"]
    for call in calls_in(answer):
        assert call["name"] == "get_weather"
        if ended(answer):  # the length of the text is not limited
            assert json.loads(call["arguments"]).keys() == {"location"}


def test_lilac_responses_tools_examples_call(answers: Answers) -> None:
    """At temperature 1, the model may also answer in words."""
    assert any(calls_in(answers[language, "tools"]) for language in LANGUAGES)


@pytest.mark.parametrize("language", ["python", "curl"])
def test_lilac_responses_instructions_example(answers: Answers, language: str) -> None:
    answer = answers[language, "instructions"]
    ended(answer)
    assert answer["instructions"].startswith("Always respond in JSON")
    assert answer["usage"]["output_tokens"] <= 50


def test_lilac_responses_tool_call_example(shared_server: Server) -> None:
    """With a required call and a limited string, the example prints what its documentation shows."""
    example = lilac_responses.PYTHON_TOOLS.replace("tools=[", "tool_choice='required', temperature=0, tools=[", 1)
    bounded = example.replace('"location": {"type": "string"}', '"location": {"type": "string", "maxLength": 20}')
    result = run(shared_server, "python", bounded)
    assert result.returncode == 0, result.stderr
    for line in result.stdout.splitlines():
        name, _, arguments = line.removesuffix(")").partition("(")
        assert name == "get_weather"
        assert json.loads(arguments).keys() == {"location"}
    assert result.stdout
