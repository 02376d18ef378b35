from __future__ import annotations

import tempfile
from collections.abc import Iterator

import pytest

from tests.engine.processes import fleet_harness, manager_harness


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder for sockets. Closes the harnesses of the test."""
    with tempfile.TemporaryDirectory() as path:
        yield path
    while manager_harness.harnesses:
        manager_harness.harnesses.pop().close()
    while fleet_harness.harnesses:
        fleet_harness.harnesses.pop().close()
