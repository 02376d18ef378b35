"""Responses with the clients that people use against `syringa serve`, on the real model.

What each does with the server stands in its script. The model is weak: the checks are on the shape of what it says,
hardly on the sense.
"""

from __future__ import annotations

import pytest

from tests.e2e.scripts import run_node, run_python
from tests.e2e.sdk import OPENAI_AGENTS, OPENAI_JS, OPENAI_PYTHON
from tests.e2e.server import Server

pytestmark = pytest.mark.model

PYTHON = {
    "openai_responses_client.py": OPENAI_PYTHON,
    "openai_responses_state_client.py": OPENAI_PYTHON,
    "openai_agents_client.py": OPENAI_AGENTS,
}


@pytest.mark.parametrize("script", PYTHON)
def test_python(shared_server: Server, script: str) -> None:
    run_python(shared_server, script, PYTHON[script])


def test_node(shared_server: Server) -> None:
    run_node(shared_server, "openai_responses_client.mjs", OPENAI_JS)
