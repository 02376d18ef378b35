"""The history of the lines that were typed in chats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from syringa.cli import chat

readline = pytest.importorskip("readline")


@pytest.fixture(autouse=True)
def _no_history() -> Iterator[None]:
    readline.clear_history()
    yield
    readline.clear_history()


def lines() -> list[str]:
    return [readline.get_history_item(number + 1) for number in range(readline.get_current_history_length())]


@pytest.mark.parametrize("home", [None, "elsewhere"])
def test_history_is_kept_for_the_next_chat(home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYRINGA_HOME", raising=False)
    if home is not None:
        monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / home))
    with contextlib.suppress(EOFError), chat._history():
        assert lines() == []
        readline.add_history("one")
        readline.add_history("ünd zwei")
        raise EOFError
    readline.clear_history()
    with chat._history():
        assert lines() == ["one", "ünd zwei"]
    assert [file.relative_to(tmp_path) for file in tmp_path.rglob("chat_history")] == [
        Path(home or ".cache/syringa") / "chat_history"
    ]


def test_history_keeps_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYRINGA_HOME", raising=False)
    with chat._history():
        for number in range(chat._HISTORY_LINES + 10):
            readline.add_history(str(number))
    readline.clear_history()
    with chat._history():
        assert (lines()[0], len(lines())) == ("10", chat._HISTORY_LINES)


def test_history_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "file"))
    with chat._history():
        readline.add_history("one")
