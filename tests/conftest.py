"""Settings and fixtures of all tests."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from syringa import logs
from tests.store.postgres import Postgres, why_not
from tests.tiers import SLOW, examples

_TESTS = Path(__file__).parent
_LONG_TESTS = ("ray", "e2e", "bench", "console", "cluster", "engine")  # folders, in the order in which they are run

# The same tree gives the same result: examples are derived from each test, and time limits do not depend on the load of
# the machine. `HYPOTHESIS_PROFILE=explore` looks for new examples.
_NO_TIMING: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("fixed", derandomize=True, max_examples=examples(100), **_NO_TIMING)
settings.register_profile("explore", max_examples=examples(100), **_NO_TIMING)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
# Hypothesis also draws constants of the modules that are loaded, and those depend on the order of the tests.
providers._get_local_constants = lambda: providers._local_constants


# Triton decides at its import whether kernels are interpreted, and tests of any folder may be the first to import it.
os.environ["TRITON_INTERPRET"] = "1"

# The default database belongs to this test process, not to the user or to another test process.
_data = tempfile.TemporaryDirectory(prefix="syringa-tests-")
os.environ["XDG_DATA_HOME"] = _data.name

# Results do not depend on the settings, the terminal or the proxy of the user.
for _name in [name for name in os.environ if name.startswith("SYRINGA_") and name != "SYRINGA_HOME"]:
    del os.environ[_name]
for _name in ("FORCE_COLOR", "LINES"):
    os.environ.pop(_name, None)
os.environ["COLUMNS"] = "80"
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = ",".join(filter(None, [os.environ.get(_name), "127.0.0.1", "localhost"]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # From pytest 9.2 on, Schemathesis gives all operations the same id. pytest-xdist would run one of them only.
        if item.parent is not None and not item.nodeid.endswith(item.name):
            item._id = type(item._id).parse(f"{item.parent.nodeid}::{item.name}")
    # Long tests first, with `--no-loadscope-reorder`: at the end, one process would wait for the other.
    items.sort(key=_folder_rank)
    if SLOW:
        return
    slow = [item for item in items if item.get_closest_marker("slow") or _repeats_on_postgres(item)]
    config.hook.pytest_deselected(items=slow)
    deselected = set(slow)
    items[:] = [item for item in items if item not in deselected]


def _folder_rank(item: pytest.Item) -> int:
    folder = item.path.relative_to(_TESTS).parts[0]
    return _LONG_TESTS.index(folder) if folder in _LONG_TESTS else len(_LONG_TESTS)


def _repeats_on_postgres(item: pytest.Item) -> bool:
    """Return whether a test outside of the store repeats on PostgreSQL. Only the store has SQL."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return parameters.get("database") == "postgres" and "store" not in item.path.relative_to(_TESTS).parts


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escape lone surrogates in logs and error messages: pytest-xdist cannot transfer them to the main process."""
    return _without_surrogates((yield))


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(key): _without_surrogates(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_without_surrogates, value))
    return value


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    if reason := why_not():
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The `database` setting of an empty database: SQLite or PostgreSQL."""
    if request.param == "sqlite":
        return str(tmp_path / "data" / "syringa.db")
    url: str = request.getfixturevalue("postgres").new_database()
    return url


@pytest.fixture
def restore_logging() -> Iterator[None]:
    """Undo what `logs.configure` does to the process."""
    root, ours = logging.getLogger(), logging.getLogger("syringa")
    levels, handlers, hook = (root.level, ours.level, logs.PROMPTS.level), list(root.handlers), sys.excepthook
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    sys.excepthook = hook
    for logger, level in zip((root, ours, logs.PROMPTS), levels, strict=True):
        logger.setLevel(level)
    logging.getLogger("python_multipart").setLevel(logging.NOTSET)
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = True
