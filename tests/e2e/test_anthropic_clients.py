"""Anthropic's packages for Python and JavaScript against `syringa serve`, on the real model.

The checks of a client are in its script. The model is small, so they check the format of responses, not the content.
"""

from __future__ import annotations

import pytest

from tests.e2e.scripts import run_node, run_python
from tests.e2e.sdk import ANTHROPIC_JS, ANTHROPIC_PYTHON
from tests.e2e.server import Server

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_anthropic_python_package_passes_its_checks(shared_server: Server) -> None:
    run_python(shared_server, "anthropic_messages_client.py", ANTHROPIC_PYTHON)


def test_anthropic_javascript_package_passes_its_checks(shared_server: Server) -> None:
    run_node(shared_server, "anthropic_messages_client.mjs", ANTHROPIC_JS)
