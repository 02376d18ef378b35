"""Run the scripts of a client package in its environment against a server.

A script prints a line of JSON for each of its checks: the name, and the error or null.
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
    run_python_at(server.url, script, environment, key, MODEL)


def run_python_at(url: str, script: str, environment: tuple[str, ...], key: str, model: str) -> None:
    """Like `run_python`, against any server."""
    command = [str(python_with(*environment)), str(HERE / script), url, key, model]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    _check(result, re.findall(r"^def (check_\w+)", (HERE / script).read_text(), re.MULTILINE))


def run_node(server: Server, script: str, environment: tuple[str, ...]) -> None:
    node, folder = node_with(*environment)
    text = (HERE / script).read_text()
    # Through standard input: Node then resolves packages from the working directory.
    command = [node, "--input-type=module", "-", server.url, KEY, MODEL]
    result = subprocess.run(command, input=text, cwd=folder, capture_output=True, text=True, timeout=600)
    _check(result, re.findall(r'^check\("([^"]+)"', text, re.MULTILINE))


def _check(result: subprocess.CompletedProcess[str], names: list[str]) -> None:
    """Fail unless every check has reported, and without an error."""
    assert result.returncode == 0, result.stderr
    reports = {line["name"]: line["error"] for line in map(json.loads, result.stdout.splitlines())}
    assert list(reports) == names
    if failed := {name: error for name, error in reports.items() if error}:
        details = "\n".join(f"{name}:\n{error}" for name, error in failed.items())
        pytest.fail(f"{len(failed)} of {len(names)} checks failed\n{details}", pytrace=False)
