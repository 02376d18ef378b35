from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from syringa.cli.answer import AnswerPrinter, split_blocks
from syringa.cli.source import TextChunk


def terminal() -> tuple[Console, io.StringIO]:
    output = io.StringIO()
    return Console(file=output, force_terminal=True, width=40, highlight=False, color_system=None), output


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
    ],
)
def test_split_blocks(text: str, complete: str) -> None:
    assert split_blocks(text) == (complete, text.removeprefix(complete))


@given(st.text(alphabet="a`~-1. \n", max_size=60))
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


def test_printer_prints_text_as_it_is_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with AnswerPrinter(Console(file=io.StringIO(), force_terminal=False)) as printer:
        printer.feed(TextChunk(text="**a**\n\n"))
        printer.feed(TextChunk(text="b"))
    assert capsys.readouterr().out == "**a**\n\nb"


def test_printer_shows_an_incomplete_block_at_the_end() -> None:
    console, output = terminal()
    with AnswerPrinter(console) as printer:
        printer.feed(TextChunk(text="partial answer"))
        assert printer.text == "partial answer"
    assert "partial answer" in output.getvalue()


def feed_reasoning(console: Console) -> None:
    with AnswerPrinter(console) as printer:
        for piece in ("The user wants to know ", "how long the lines of the ter", "minal are. [/b]"):
            printer.feed(TextChunk(text=piece, reasoning=True))
        printer.feed(TextChunk(text="Forty columns."))


def test_printer_wraps_reasoning_between_words() -> None:
    console, output = terminal()
    feed_reasoning(console)
    assert [line.rstrip() for line in output.getvalue().splitlines()][:3] == [
        "The user wants to know how long the",
        "lines of the terminal are. [/b]",
        "",
    ]


def test_printer_prints_reasoning_without_an_answer() -> None:
    console, output = terminal()
    with AnswerPrinter(console) as printer:
        printer.feed(TextChunk(text="unfinished", reasoning=True))
    assert output.getvalue() == "unfinished"


def test_printer_does_not_wrap_reasoning_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    output = io.StringIO()
    feed_reasoning(Console(file=output, force_terminal=False, width=40))
    assert output.getvalue() == "The user wants to know how long the lines of the terminal are. [/b]\n\n"
    assert capsys.readouterr().out == "Forty columns."
