"""Runs the scripts that use a client's package, each in the environment of that package, against a server.

A script prints a line of JSON for every check in it: its name, and what went wrong.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import KEY, MODEL
from tests.e2e.sdk import node_with, python_with
from tests.e2e.server import Server

HERE = Path(__file__).parent


def run_python(server: Server, script: str, environment: tuple[str, ...], key: str = KEY) -> None:
    command = [str(python_with(*environment)), str(HERE / script), server.url, key, MODEL]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    _check(result, re.findall(r"^def (check_\w+)", (HERE / script).read_text(), re.MULTILINE))


def run_node(server: Server, script: str, environment: tuple[str, ...]) -> None:
    node, folder = node_with(*environment)
    text = (HERE / script).read_text()
    # By way of standard input: packages are looked for beside a script, or in the working folder if there is none.
    command = [node, "--input-type=module", "-", server.url, KEY, MODEL]
    result = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True, timeout=600)
    _check(result, re.findall(r'^check\("([^"]+)"', text, re.MULTILINE))


def _check(result: subprocess.CompletedProcess[str], names: list[str]) -> None:
    """Every check has reported, and nothing went wrong in any."""
    assert result.returncode == 0, result.stderr
    reports = {line["name"]: line["wrong"] for line in map(json.loads, result.stdout.splitlines())}
    assert list(reports) == names
    if failed := {name: wrong for name, wrong in reports.items() if wrong}:
        told = "\n".join(f"{name}:\n{wrong}" for name, wrong in failed.items())
        pytest.fail(f"{len(failed)} of {len(names)} checks failed\n{told}", pytrace=False)
