"""A chat with a source that needs no model: its commands, its errors, and the files that it writes."""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from syringa.cli import chat
from syringa.cli.source import TextChunk
from syringa.errors import EngineUnavailable

readline = pytest.importorskip("readline")


class EchoSource:
    """Answers with the last message, or raises an error."""

    name = "[echo]"
    error: Exception | None = None

    def __init__(self) -> None:
        self.conversations: list[list[dict[str, Any]]] = []

    async def chat(self, messages: Sequence[dict[str, Any]], fields: object) -> AsyncGenerator[TextChunk]:
        self.conversations.append([*messages])
        if self.error is not None:
            raise self.error
        yield TextChunk(text=f"echo of {messages[-1]['content']}")

    async def complete(self, fields: object) -> AsyncGenerator[TextChunk]:
        raise NotImplementedError
        yield


@pytest.fixture
def source() -> EchoSource:
    return EchoSource()


@pytest.fixture
def converse(source: EchoSource, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Type lines in a chat, and return what it shows."""

    def run(*lines: str, system: str | None = None) -> str:
        left = iter(lines)
        monkeypatch.setattr("builtins.input", lambda prompt: next(left, "/exit"))
        output = io.StringIO()
        console = Console(file=output, force_terminal=False, width=200, highlight=False)
        with asyncio.Runner() as runner:
            chat.ChatSession(source, {}, console, runner, system).loop()
        return output.getvalue()

    return run


def test_save_writes_the_conversation_with_its_system_message(converse: Callable[..., str]) -> None:
    shown = converse("one", "two \\", "lines", "/save chat.md", system="Be kind.")
    assert "Saved to chat.md." in shown
    assert Path("chat.md").read_text() == (
        "## system\n\nBe kind.\n\n## user\n\none\n\n## assistant\n\necho of one\n\n"
        "## user\n\ntwo \nlines\n\n## assistant\n\necho of two \nlines\n"
    )


def test_save_overwrites_only_what_the_chat_has_written(converse: Callable[..., str]) -> None:
    Path("mine.md").write_text("precious")
    shown = converse("one", "/save mine.md", "/save chat.md", "two", "/save chat.md")
    assert "mine.md exists already: choose another name." in shown
    assert Path("mine.md").read_text() == "precious"
    assert shown.count("Saved to chat.md.") == 2
    assert Path("chat.md").read_text().endswith("echo of two\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "/save needs the name of a file."),
        ("/no/such/folder/x", "/no/such/folder/x cannot be written: No such file or directory"),
        ("~nobody-at-all/x", "~nobody-at-all/x cannot be written: Could not determine home directory."),
        ("a\0b", "cannot be written: "),
        ("[/x]/y", "[/x]/y cannot be written: No such file or directory"),
    ],
)
def test_file_that_cannot_be_saved_does_not_end_the_chat(
    name: str, message: str, converse: Callable[..., str], source: EchoSource
) -> None:
    assert message in converse("one", f"/save {name}", "two")
    assert len(source.conversations[-1]) == 3


def test_save_writes_what_is_no_text_as_question_marks(converse: Callable[..., str]) -> None:
    assert "Saved to chat.md." in converse("a\udcff", "/save chat.md")
    assert "a?\n" in Path("chat.md").read_text()


@pytest.mark.parametrize("message", ["no [/INST] here", "[a] is [b]x[/b]"])
def test_error_is_shown_as_it_is(message: str, converse: Callable[..., str], source: EchoSource) -> None:
    source.error = EngineUnavailable(message)
    assert message in converse("one", "two")
    assert [len(each) for each in source.conversations] == [1, 1]  # the question is not kept


def test_run_keeps_the_history_and_shows_the_name_as_it_is(
    source: EchoSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(prompt: str) -> str:
        readline.add_history("typed")
        raise EOFError

    monkeypatch.setenv("SYRINGA_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(chat, "open_source", lambda *_, **__: contextlib.nullcontext(source))
    monkeypatch.setattr("builtins.input", read)
    readline.clear_history()
    try:
        assert chat.run({}, {}, None, "http://localhost", None, None) == 0
    finally:
        readline.clear_history()
    assert "typed" in (tmp_path / "home" / "chat_history").read_text().splitlines()
    assert "[echo]" in capsys.readouterr().out


def test_run_reads_bytes_that_are_no_text(source: EchoSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "open_source", lambda *_, **__: contextlib.nullcontext(source))
    monkeypatch.setattr(chat, "_history", contextlib.nullcontext)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), encoding="utf-8"))
    assert chat.run({}, {}, None, "http://localhost", None, None) == 0
    assert source.conversations[0] == [{"role": "user", "content": "caf\ufffd"}]


def test_undecodable_argument_is_sent_as_text(converse: Callable[..., str], source: EchoSource) -> None:
    converse("one", system="caf\udce9")
    assert source.conversations[0][0] == {"role": "system", "content": "caf\ufffd"}
