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
SCRIPTS = {
    "openai_chat_client.py": OPENAI_PYTHON,
    "openai_tools_client.py": OPENAI_PYTHON,
    "langchain_client.py": LANGCHAIN,
    "instructor_client.py": INSTRUCTOR,
    "openai_chat_client.mjs": OPENAI_JS,
    "ai_sdk_client.mjs": AI_SDK,
}
CHECK = {".py": r"^def (check_\w+)", ".mjs": r'^check\("([^"]+)"'}


def checks() -> list[tuple[str, str]]:
    """Each check's script and name."""
    paths = [HERE / script for script in SCRIPTS]
    return [
        (path.name, name) for path in paths for name in re.findall(CHECK[path.suffix], path.read_text(), re.MULTILINE)
    ]


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest, shared_server: Server) -> dict[str, str | None]:
    """What went wrong in each check of one script: all in one process, since importing a package takes a while."""
    path = HERE / request.param
    arguments = [shared_server.url, KEY, MODEL]
    with path.open() as script:
        if path.suffix == ".py":
            command, folder = [str(python_with(*SCRIPTS[path.name])), str(path)], None
        else:
            # By way of standard input: packages are looked for beside a script, or where there is none, here.
            node, folder = node_with(*SCRIPTS[path.name])
            command = [node, "--input-type=module", "-"]
        result = subprocess.run(
            command + arguments, stdin=script, cwd=folder, capture_output=True, text=True, timeout=180
        )
    assert result.returncode == 0, result.stderr
    return {line["name"]: line["wrong"] for line in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize(("report", "check"), checks(), indirect=["report"])
def test_the_client(report: dict[str, str | None], check: str) -> None:
    if wrong := report[check]:
        pytest.fail(wrong, pytrace=False)
