"""Chat with the clients that people use against `syringa serve`, on the real model.

What each does with the server stands in its script, which prints a line of JSON for every check in it. The model is
weak: the checks are on the shape of what it says, hardly on the sense.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, MODEL
from tests.e2e.sdk import AI_SDK, INSTRUCTOR, LANGCHAIN, OPENAI_JS, OPENAI_PYTHON, node_with, python_with
from tests.e2e.server import Server

pytestmark = pytest.mark.model

HERE = Path(__file__).parent
PYTHON = {
    "openai_chat_client.py": OPENAI_PYTHON,
    "openai_tools_client.py": OPENAI_PYTHON,
    "langchain_client.py": LANGCHAIN,
    "instructor_client.py": INSTRUCTOR,
}
NODE = {"openai_chat_client.mjs": OPENAI_JS, "ai_sdk_client.mjs": AI_SDK}


@pytest.mark.parametrize("script", PYTHON)
def test_python(shared_server: Server, script: str) -> None:
    command = [str(python_with(*PYTHON[script])), str(HERE / script), shared_server.url, KEY, MODEL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180)
    check(result, re.findall(r"^def (check_\w+)", (HERE / script).read_text(), re.MULTILINE))


@pytest.mark.parametrize("script", NODE)
def test_node(shared_server: Server, script: str) -> None:
    node, folder = node_with(*NODE[script])
    text = (HERE / script).read_text()
    # By way of standard input: packages are looked for beside a script, or in the working folder if there is none.
    command = [node, "--input-type=module", "-", shared_server.url, KEY, MODEL]
    result = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True, timeout=180)
    check(result, re.findall(r'^check\("([^"]+)"', text, re.MULTILINE))


def check(result: subprocess.CompletedProcess[str], names: list[str]) -> None:
    """Every check has reported, and nothing went wrong in any."""
    assert result.returncode == 0, result.stderr
    reports = {line["name"]: line["wrong"] for line in map(json.loads, result.stdout.splitlines())}
    assert list(reports) == names
    if failed := {name: wrong for name, wrong in reports.items() if wrong}:
        told = "\n".join(f"{name}:\n{wrong}" for name, wrong in failed.items())
        pytest.fail(f"{len(failed)} of {len(names)} checks failed\n{told}", pytrace=False)
