"""A server that is shared by the tests that only send requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serve

KEY, MODEL = "a-key-for-tests", "smollm2"


@pytest.fixture(scope="package")
def shared_server() -> Iterator[Server]:
    """A server with a short context, so that a response without an end token is soon complete."""
    settings = ("--served-model-name", MODEL, "--max-model-len", "1280", "--requests-per-minute", "0")
    with serve("--api-key", KEY, *settings) as server:
        yield server
