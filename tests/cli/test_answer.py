from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from syringa.cli.answer import AnswerPrinter, split_blocks
from syringa.cli.source import TextChunk


@pytest.fixture(autouse=True)
def _columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")


def terminal(kind: str = "xterm") -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    environment = {"TERM": kind}
    console = Console(
        file=output, force_terminal=True, width=40, highlight=False, color_system=None, _environ=environment
    )
    return console, output


def pipe() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=False, width=40), output


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo\n", "one\n\n"),
        ("one\n\ntwo", ""),  # the second line may still become a list item
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nafter\n", "```\na\n\nb\n```\n\n"),
        ("1. a\n\n2. b\n", ""),
        ("- a\n\n  more\n", ""),
        ("- a\n\nafter\n", "- a\n\n"),
        ("one\u2028line\n\ntwo\n", "one\u2028line\n\n"),
        ("one\x85\x0c\n\ntwo\x0b\n", "one\x85\x0c\n\n"),
        ("one\r\n\r\ntwo\r\n", "one\r\n\r\n"),
        ("one\n\x0c\ntwo\n", ""),  # a line with a form feed is not empty
    ],
)
def test_split_blocks(text: str, complete: str) -> None:
    assert split_blocks(text) == (complete, text.removeprefix(complete))


@given(st.text(alphabet="a`~-1. \n\r\x0c\x85\u2028", max_size=60))
def test_split_blocks_loses_nothing(text: str) -> None:
    complete, rest = split_blocks(text)
    assert complete + rest == text


def test_printer_formats_markdown_in_a_terminal() -> None:
    console, output = terminal()
    with AnswerPrinter(console) as printer:
        for piece in ("# Title\n", "\nSome **bold** text", " that is long enough to be wrapped.\n\n", "- item"):
            printer.feed(TextChunk(text=piece))
        printer.feed(TextChunk(tokens=12))
    shown = output.getvalue()
    assert "**bold**" not in shown.rpartition("Title")[2]
    assert " • item" in shown
    assert printer.text == "# Title\n\nSome **bold** text that is long enough to be wrapped.\n\n- item"
    assert printer.times.tokens == 12


def test_printer_prints_text_as_it_is_elsewhere() -> None:
    console, output = pipe()
    with AnswerPrinter(console) as printer:
        printer.feed(TextChunk(text="**a** " + 20 * "word " + "\n\n"))
        printer.feed(TextChunk(text="b"))
    assert output.getvalue() == "**a** " + 20 * "word " + "\n\nb"


def test_printer_wraps_words_in_a_terminal_that_shows_no_markdown() -> None:
    console, output = terminal("dumb")
    with AnswerPrinter(console) as printer:
        for piece in ("A long line that **is** too wi", "de for a terminal of 40 columns.\n\n    co", "de"):
            printer.feed(TextChunk(text=piece))
    assert output.getvalue().splitlines() == [
        "A long line that **is** too wide for a",
        "terminal of 40 columns.",
        "",
        "    code",
    ]
    assert output.getvalue().endswith("code\n")
    assert printer.text.startswith("A long line that **is** too wide for a terminal")


def test_printer_shows_an_incomplete_block_before_and_at_the_end() -> None:
    console, output = terminal()
    with AnswerPrinter(console) as printer:
        printer.feed(TextChunk(text="partial answer"))
        assert printer.text == "partial answer"
        assert "partial answer" in output.getvalue()
        output.truncate(output.seek(0))
    assert "partial answer" in output.getvalue()


def feed_reasoning(console: Console) -> None:
    with AnswerPrinter(console) as printer:
        for piece in ("The user wants to know ", "how long the lines of the ter", "minal are. [/b]"):
            printer.feed(TextChunk(text=piece, reasoning=True))
        printer.feed(TextChunk(text="Forty columns."))


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_printer_wraps_reasoning_between_words(kind: str) -> None:
    console, output = terminal(kind)
    feed_reasoning(console)
    assert [line.rstrip() for line in output.getvalue().splitlines()][:3] == [
        "The user wants to know how long the",
        "lines of the terminal are. [/b]",
        "",
    ]


@pytest.mark.parametrize("kind", ["xterm", "dumb"])
def test_printer_prints_reasoning_without_an_answer(kind: str) -> None:
    console, output = terminal(kind)
    with AnswerPrinter(console) as printer:
        printer.feed(TextChunk(text="unfinished", reasoning=True))
    assert output.getvalue() == "unfinished\n"


def test_printer_prints_reasoning_to_standard_error_where_the_output_is_no_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    console, output = pipe()
    feed_reasoning(console)
    assert output.getvalue() == "Forty columns."
    shown = capsys.readouterr()
    assert shown.err == "The user wants to know how long the lines of the terminal are. [/b]\n\n"
    assert shown.out == ""
