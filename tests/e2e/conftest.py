"""One server for all tests that only talk to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serve

KEY, MODEL = "a-key-for-tests", "smollm2"


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Server]:
    """With a context in which an answer that finds no end of its own ends soon."""
    settings = ("--served-model-name", MODEL, "--max-model-len", "1280", "--requests-per-minute", "0")
    with serve("--api-key", KEY, *settings) as server:
        yield server
