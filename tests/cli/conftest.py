"""Fixtures that run commands in an empty folder, without the user's settings."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from syringa.cli import main
from syringa.config import FIELDS, variable
from syringa.store import Store


class Result(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_logging: None) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.delenv("SYRINGA_CONFIG", raising=False)
    for name in FIELDS:
        monkeypatch.delenv(variable(name), raising=False)


@pytest.fixture
def syringa(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        captured = capsys.readouterr()
        return Result(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def on_store(database: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Store], Awaitable[Any]]], Any]:
    """Run a coroutine function on the store that commands find through the environment."""
    monkeypatch.setenv("SYRINGA_DATABASE", database)

    def run(work: Callable[[Store], Awaitable[Any]]) -> Any:
        async def run_on_store() -> Any:
            async with Store(database) as store:
                return await work(store)

        return asyncio.run(run_on_store())

    return run


@pytest.fixture
def error_of(syringa: Callable[..., Result]) -> Callable[..., str]:
    """Run a command that fails, and return its error message of one line."""

    def run(*arguments: str) -> str:
        result = syringa(*arguments)
        assert (result.status, result.out) == (1, "")
        assert result.err.startswith("syringa: ")
        assert result.err.count("\n") == 1
        return str(result.err)

    return run
