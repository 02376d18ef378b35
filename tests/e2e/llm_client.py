"""The `llm` package, with models of its configuration file. It runs in the environment of that package.

python llm_client.py URL KEY MODEL
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import llm
import openai
from client_checks import expect_error, run_checks

URL, KEY, MODEL = sys.argv[1:]
ASKED = "What is the capital of France?"
FOLDER = tempfile.TemporaryDirectory(prefix="llm-test-")
os.environ["LLM_USER_PATH"] = FOLDER.name
os.environ["LLM_SYRINGA_KEY"] = KEY
SERVER = {"model_name": MODEL, "api_base": URL + "/v1", "api_key_name": "syringa"}
FEATURES = {"supports_schema": True, "supports_tools": True}
# YAML includes JSON.
Path(FOLDER.name, "extra-openai-models.yaml").write_text(
    json.dumps(
        [
            {"model_id": "chat", **SERVER, **FEATURES},
            {"model_id": "responses", "responses": True, **SERVER, **FEATURES},
            {"model_id": "completion", "completion": True, **SERVER},
            {"model_id": "none", **SERVER, "model_name": "none"},
        ]
    )
)
Path(FOLDER.name, "keys.json").write_text(json.dumps({"syringa": KEY}))

BOTH = ("chat", "responses")
LIMITS = {"temperature": 0, "max_tokens": 60}
# Limited, because a small model may not end a text.
LANGUAGE = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "year": {"type": "integer", "maximum": 2025}},
    "required": ["name", "year"],
    "additionalProperties": False,
}


def check_prompt() -> None:
    for name in BOTH:
        response = llm.get_model(name).prompt(ASKED, system="Answer in one sentence.", stream=False, **LIMITS)
        assert "Paris" in response.text(), name
        assert response.usage().input > 0
        assert response.usage().output > 0


def check_stream() -> None:
    for name in BOTH:
        whole = llm.get_model(name).prompt(ASKED, stream=False, **LIMITS).text()
        parts = list(llm.get_model(name).prompt(ASKED, **LIMITS))
        assert len(parts) > 3
        assert "".join(parts) == whole


def check_async() -> None:
    async def ask(name):
        return await llm.get_async_model(name).prompt(ASKED, **LIMITS).text()

    for name in BOTH:
        assert "Paris" in asyncio.run(ask(name))


def check_conversation() -> None:
    for name in BOTH:
        conversation = llm.get_model(name).conversation()
        assert conversation.prompt("My name is Ann.", **LIMITS).text()
        assert conversation.prompt("What is my name?", **LIMITS).text()


def check_schema() -> None:
    for name in BOTH:
        response = llm.get_model(name).prompt("Name a programming language.", schema=LANGUAGE, **LIMITS)
        assert json.loads(response.text()).keys() == {"name", "year"}


def check_tools() -> None:
    """The package always lets the model choose, and a small one may not call: both answers are correct."""

    def get_weather(city: str) -> str:
        """The weather of a city."""
        return "Sunny, 21 °C"

    for name in BOTH:
        conversation = llm.get_model(name).conversation()
        first = conversation.prompt("What is the weather in Paris?", tools=[get_weather], **LIMITS)
        assert first.text() or first.tool_calls()
        results = first.execute_tool_calls()
        assert [each.output for each in results] == ["Sunny, 21 °C"] * len(results)
        second = conversation.prompt("And now?", tool_results=results, **LIMITS)
        assert second.text() or second.tool_calls()


def check_completion() -> None:
    response = llm.get_model("completion").prompt("The capital of France is", temperature=0, max_tokens=5)
    assert response.text()


def check_command_line() -> None:
    command = [sys.executable, "-m", "llm", "-m", "chat", "-o", "temperature", "0", "-o", "max_tokens", "60", ASKED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout


def check_errors() -> None:
    response = llm.get_model("none").prompt(ASKED, stream=False)
    assert expect_error(openai.NotFoundError, response.text).code == "model_not_found"


if __name__ == "__main__":
    run_checks(globals())
