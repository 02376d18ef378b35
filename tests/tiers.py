"""The two tiers of the test suite: `make test` and `make test SLOW=1`.

A test belongs to the slow tier (`@pytest.mark.slow`) when it takes long because of its volume (load, soak, kernel
matrices, many client libraries) and a smaller test of the fast tier covers the same code. Property tests run in both
tiers, with fewer examples in the fast one.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

SLOW = os.environ.get("SLOW", "") not in ("", "0")


def examples(count: int) -> int:
    """Return how many examples a property test runs in this tier, given the count of the slow tier."""
    return count if SLOW else max(10, count // 4)


def slow(*values: Any) -> list[Any]:
    """Return parameters of `pytest.mark.parametrize` that run in the slow tier only."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
