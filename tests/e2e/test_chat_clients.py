"""Chat of common client packages against `syringa serve`, on the real model.

The checks of a client are in its script. The model is small, so they check the format of responses, not the content.
"""

from __future__ import annotations

import pytest

from tests.e2e.scripts import run_node, run_python
from tests.e2e.sdk import AI_SDK, INSTRUCTOR, LANGCHAIN, LITELLM, LLM, OPENAI_JS, OPENAI_PYTHON, PYDANTIC_AI
from tests.e2e.server import Server

pytestmark = pytest.mark.model

PYTHON = {
    "openai_chat_client.py": OPENAI_PYTHON,
    "openai_tools_client.py": OPENAI_PYTHON,
    "langchain_client.py": LANGCHAIN,
    "instructor_client.py": INSTRUCTOR,
    "litellm_client.py": LITELLM,
    "pydantic_ai_client.py": PYDANTIC_AI,
    "llm_client.py": LLM,
}
NODE = {"openai_chat_client.mjs": OPENAI_JS, "ai_sdk_client.mjs": AI_SDK, "ai_sdk_openai_client.mjs": AI_SDK}
# OpenAI's own packages run in both tiers, but for the longest script.
FAST = ("openai_chat_client.py", "openai_chat_client.mjs")
SLOW = {script: pytest.mark.slow for script in (*PYTHON, *NODE) if script not in FAST}


@pytest.mark.parametrize("script", [pytest.param(each, marks=SLOW.get(each, ())) for each in PYTHON])
def test_python_client_passes_its_chat_checks(shared_server: Server, script: str) -> None:
    run_python(shared_server, script, PYTHON[script])


@pytest.mark.parametrize("script", [pytest.param(each, marks=SLOW.get(each, ())) for each in NODE])
def test_node_client_passes_its_chat_checks(shared_server: Server, script: str) -> None:
    run_node(shared_server, script, NODE[script])
