"""What every test shares."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.store.postgres import Postgres, why_not
from tests.tiers import SLOW, examples

_TESTS = Path(__file__).parent

# The same tree gives the same result: examples are derived from each test, and time limits do not depend on the load of
# the machine. `HYPOTHESIS_PROFILE=explore` looks for new examples.
_NO_TIMING: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, max_examples=examples(100), **_NO_TIMING)
settings.register_profile("explore", max_examples=examples(100), **_NO_TIMING)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


# Triton decides at its import whether kernels are interpreted, and tests of any folder may be the first to import it.
os.environ["TRITON_INTERPRET"] = "1"

# Whatever a test stores without saying where goes to a folder of the tests' own, not to the user's.
_data = tempfile.TemporaryDirectory(prefix="syringa-tests-")
os.environ["XDG_DATA_HOME"] = _data.name


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if SLOW:
        return
    slow = [item for item in items if item.get_closest_marker("slow") or _repeats_on_postgres(item)]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in set(slow)]


def _repeats_on_postgres(item: pytest.Item) -> bool:
    """Whether a test beyond the store runs once more on PostgreSQL. SQL differs in the store only."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("database") == "postgres" and "store" not in item.path.relative_to(_TESTS).parts


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if reason := why_not():
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The setting for an empty database, of either kind."""
    if request.param == "sqlite":
        return str(tmp_path / "data" / "syringa.db")
    url: str = request.getfixturevalue("postgres").new_database()
    return url
