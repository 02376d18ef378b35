"""The official `openai` package for JavaScript against `syringa serve`, on the real model."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.sdk import node_with
from tests.e2e.server import serve

pytestmark = pytest.mark.model

OPENAI = "openai@6.49.0"  # the last that runs on Node 20: 7 needs 22
KEY, MODEL = "a-key-for-tests", "smollm2"
SCRIPT = Path(__file__).with_name("openai_client.mjs")


def test_the_package() -> None:
    node, folder = node_with("openai-js", OPENAI)
    with serve("--api-key", KEY, "--served-model-name", MODEL) as server:
        # By way of standard input: packages are looked for beside a script, or in the working folder if there is none.
        command = [node, "--input-type=module", "-", server.url, KEY, MODEL]
        with SCRIPT.open() as script:
            result = subprocess.run(command, stdin=script, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "all is well\n"
