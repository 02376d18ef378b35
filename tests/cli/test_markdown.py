"""Markdown in a terminal: nothing that the model wrote is left out."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from syringa.cli.markdown import AnswerMarkdown


def show(text: str, width: int = 60) -> str:
    output = io.StringIO()
    Console(file=output, force_terminal=True, width=width, color_system=None).print(AnswerMarkdown(text))
    return output.getvalue()


def lines(text: str) -> list[str]:
    return [line.strip() for line in show(text).splitlines()]


@pytest.mark.parametrize(
    "text",
    [
        "<div>\n  <b>shown</b>\n</div>",
        "<!-- a comment -->",
        "foo<Bar>(x) is `list<T>`, or <T> here",
        "Press <kbd>Ctrl</kbd>, or a<br>b",
        "Solve \\[ x_1 * \\{ y_2 * z \\} \\] and \\(a\\, b\\) and $$ \\frac{a}{b} \\\\ _c_ $$",
        "It begins with \\[ and never ends, for $5 or $$6",
        "See <https://example.com/a> and ![a tree](https://example.com/tree.png)",
        "As [one] says\n\n[one]: https://example.com/one",
        "```html\n<p>in a fence</p>\n```",
        "    <p>indented</p>",
    ],
)
def test_every_word_is_shown(text: str) -> None:
    shown = show(text)
    for word in re.sub(r"^```html|[\[\]()`!]", " ", text, flags=re.MULTILINE).split():
        assert word in shown


@pytest.mark.parametrize("formula", ["\\[ a_1 \\_ b_1 \\]", "\\(x \\*y\\* z\\)", "\\[\n\\sum_i \\{ i \\}\n\\]"])
def test_formula_is_shown_as_it_is_written(formula: str) -> None:
    assert lines(f"So **{formula}** holds") == f"So {formula} holds".split("\n")


def test_address_of_a_link_is_shown() -> None:
    shown = show("Read the [docs](https://example.com/a).")
    assert "Read the docs (https://example.com/a)." in shown
    assert "\x1b]8;" not in shown


def test_lines_end_where_they_do_in_the_text() -> None:
    assert lines("Roses are red\nViolets are blue") == ["Roses are red", "Violets are blue"]
    assert lines("- one\n  line\n- two") == ["", "• one", "line", "• two"]


def test_long_word_in_a_table_is_not_cut_off() -> None:
    word = "".join(f"{number:03}" for number in range(60))
    cells = "".join(re.findall(r"\d+", show(f"| a | b |\n|---|---|\n| {word} | x |", width=40)))
    assert cells == word


def test_markdown_is_formatted_otherwise() -> None:
    shown = show("# Title\n\n1. **bold** ~~gone~~ \\*plain\\*\n\n| a |\n|---|\n| 1 |")
    assert "**" not in shown
    assert "bold gone *plain*" in shown
    assert "---" not in shown
