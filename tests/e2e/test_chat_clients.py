"""Chat with the clients that people use against `syringa serve`, on the real model.

What each does with the server stands in its script, which prints a line of JSON for every check in it. The model is
weak: the checks are on the shape of what it says, hardly on the sense.
"""

from __future__ import annotations

import pytest

from tests.e2e.scripts import run_node, run_python
from tests.e2e.sdk import AI_SDK, INSTRUCTOR, LANGCHAIN, OPENAI_JS, OPENAI_PYTHON
from tests.e2e.server import Server

pytestmark = pytest.mark.model

PYTHON = {
    "openai_chat_client.py": OPENAI_PYTHON,
    "openai_tools_client.py": OPENAI_PYTHON,
    "langchain_client.py": LANGCHAIN,
    "instructor_client.py": INSTRUCTOR,
}
NODE = {"openai_chat_client.mjs": OPENAI_JS, "ai_sdk_client.mjs": AI_SDK}


@pytest.mark.parametrize("script", PYTHON)
def test_python(shared_server: Server, script: str) -> None:
    run_python(shared_server, script, PYTHON[script])


@pytest.mark.parametrize("script", NODE)
def test_node(shared_server: Server, script: str) -> None:
    run_node(shared_server, script, NODE[script])
