from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.engine.processes.manager_harness import harnesses


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder for sockets. Closes the manager harnesses of the test."""
    with tempfile.TemporaryDirectory() as path:
        yield path
    while harnesses:
        harnesses.pop().close()
