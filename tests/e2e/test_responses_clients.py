"""Responses API of common client packages against `syringa serve`, on the real model.

The checks of a client are in its script. The model is small, so they check the format of responses, not the content.
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
SLOW = dict.fromkeys(("openai_agents_client.py", "openai_responses_state_client.py"), pytest.mark.slow)


@pytest.mark.parametrize("script", [pytest.param(each, marks=SLOW.get(each, ())) for each in PYTHON])
def test_python_client_passes_its_responses_checks(shared_server: Server, script: str) -> None:
    run_python(shared_server, script, PYTHON[script])


def test_node_client_passes_its_responses_checks(shared_server: Server) -> None:
    run_node(shared_server, "openai_responses_client.mjs", OPENAI_JS)
