"""The official `openai` package for JavaScript against `syringa serve`, on the real model."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, MODEL
from tests.e2e.sdk import OPENAI_JS, node_with
from tests.e2e.server import Server

pytestmark = pytest.mark.model

SCRIPT = Path(__file__).with_name("openai_client.mjs")


def test_openai_javascript_package_passes_its_checks(shared_server: Server) -> None:
    node, folder = node_with(*OPENAI_JS)
    # Through standard input: Node then resolves packages from the working directory.
    command = [node, "--input-type=module", "-", shared_server.url, KEY, MODEL]
    with SCRIPT.open() as script:
        result = subprocess.run(command, stdin=script, cwd=folder, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all is well\n"
