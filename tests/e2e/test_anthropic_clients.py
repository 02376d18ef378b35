"""Anthropic's packages for Python and JavaScript against `syringa serve`, on the real model.

The checks of a client are in its script. The model is small, so they check the format of responses, not the content.
Those of thinking and images have a server with a fake model that has both.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from syringa.config import Config
from tests.chat_models import VISION, reasoning_model
from tests.client import server
from tests.e2e.scripts import run_node, run_python, run_python_at
from tests.e2e.sdk import ANTHROPIC_JS, ANTHROPIC_PYTHON
from tests.e2e.server import Server
from tests.fake_engine import FakeEngine

pytestmark = pytest.mark.slow

WRITTEN = (
    "<think>Let me see.</think>I look. "
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
)


@pytest.mark.model
def test_anthropic_python_package_passes_its_checks(shared_server: Server) -> None:
    run_python(shared_server, "anthropic_messages_client.py", ANTHROPIC_PYTHON)


@pytest.mark.model
def test_anthropic_javascript_package_passes_its_checks(shared_server: Server) -> None:
    run_node(shared_server, "anthropic_messages_client.mjs", ANTHROPIC_JS)


async def test_types_of_the_python_package_allow_thinking_images_and_beta_blocks(tmp_path: Path) -> None:
    config = Config(port=0, drain_timeout=1.0, database=str(tmp_path / "db"), requests_per_minute=0)
    model = reasoning_model(VISION, supports_images=True)
    async with server(FakeEngine(WRITTEN, at_once=3), config, model) as http:
        arguments = ("anthropic_blocks_client.py", ANTHROPIC_PYTHON, "none", model.id)
        await asyncio.to_thread(run_python_at, str(http.base_url).rstrip("/"), *arguments)
