"""Commands run in a folder of their own, with none of the user's settings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from syringa.cli import main
from syringa.config import FIELDS, variable
from syringa.store import Store


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SYRINGA_CONFIG", raising=False)
    for name in FIELDS:
        monkeypatch.delenv(variable(name), raising=False)


@pytest.fixture
def syringa(capsys: pytest.CaptureFixture[str]) -> Callable[..., Said]:
    def run(*arguments: str) -> Said:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        said = capsys.readouterr()
        return Said(int(ended.value.code or 0), said.out, said.err)

    return run


@pytest.fixture
def stored(database: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Store], Awaitable[Any]]], Any]:
    """Runs something on the store that the commands find by their environment."""
    monkeypatch.setenv("SYRINGA_DATABASE", database)

    def run(work: Callable[[Store], Awaitable[Any]]) -> Any:
        async def inside() -> Any:
            async with Store(database) as store:
                return await work(store)

        return asyncio.run(inside())

    return run


@pytest.fixture
def refusal(syringa: Callable[..., Said]) -> Callable[..., str]:
    """The one line that a command ends with."""

    def run(*arguments: str) -> str:
        said = syringa(*arguments)
        assert (said.status, said.out) == (1, "")
        assert said.err.startswith("syringa: ")
        assert said.err.count("\n") == 1
        return said.err

    return run
