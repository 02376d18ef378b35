"""Clients of Ollama's API against `syringa serve` on its second port, with the real model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import pytest

from syringa.errors import ModelError
from syringa.modelfiles import pull
from tests.e2e.conftest import MODEL
from tests.e2e.scripts import run_node, run_python
from tests.e2e.sdk import LITELLM, OLLAMA_JS, OLLAMA_PYTHON
from tests.e2e.server import Server, serve

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def ollama() -> Iterator[Server]:
    """A server without keys, at the port for clients of Ollama. Its clients may create and delete models."""
    settings: tuple[str, ...] = ("--served-model-name", MODEL, "--max-model-len", "1280", "--requests-per-minute", "0")
    with contextlib.suppress(ModelError):
        pull("embedding")
        settings += ("--embedding-model", "embedding")
    with serve(*settings, "--ollama-port", "0") as server:
        found = re.search(r"clients of Ollama: host=\S+ port=(\d+)", server.log.read_text())
        assert found
        yield Server(server.process, int(found[1]), server.log)


@pytest.mark.parametrize(
    ("script", "environment"),
    [("ollama_client.py", OLLAMA_PYTHON), ("litellm_ollama_client.py", LITELLM)],
    ids=["ollama", "litellm"],
)
def test_python_client_passes_its_checks(ollama: Server, script: str, environment: tuple[str, ...]) -> None:
    run_python(ollama, script, environment)


def test_node_client_passes_its_checks(ollama: Server) -> None:
    run_node(ollama, "ollama_client.mjs", OLLAMA_JS)
