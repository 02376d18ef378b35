"""Markdown of an answer for a terminal, without the parts that a terminal could only leave out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token
from rich import markdown
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

# HTML, addresses of images and definitions of links would not be shown; without their rules they are plain text.
_HIDDEN = ("html_block", "html_inline", "autolink", "image", "reference")
_MATH = {"\\(": "\\)", "\\[": "\\]", "$$": "$$"}  # how formulas in LaTeX begin and end


class _WholeCells(markdown.TableElement):
    """A table whose long words continue in the next line, instead of being cut off."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for renderable in super().__rich_console__(console, options):
            if isinstance(renderable, Table):
                for column in renderable.columns:
                    column.overflow = "fold"
            yield renderable


class AnswerMarkdown(markdown.Markdown):
    """Like rich's `Markdown`, but with all words of the text: HTML, addresses and LaTeX as they are written.

    Lines end where they do in the text.
    """

    elements: ClassVar[dict[str, Any]] = {**markdown.Markdown.elements, "table_open": _WholeCells}

    def __init__(self, text: str) -> None:
        super().__init__(text, hyperlinks=False)
        self.parsed = _parser().parse(text)
        for token in _flatten(self.parsed):
            if token.type == "softbreak":
                token.type = "hardbreak"


def _parser() -> MarkdownIt:
    parser = MarkdownIt().enable("strikethrough").enable("table").disable(_HIDDEN)
    parser.inline.ruler.before("escape", "math", _parse_math)
    return parser


def _parse_math(state: StateInline, silent: bool) -> bool:
    """Take a formula as it is written: backslashes and underscores in it are no Markdown. A rule of the parser."""
    opening = state.src[state.pos : min(state.pos + 2, state.posMax)]
    if opening not in _MATH:
        return False
    closing = state.src.find(_MATH[opening], state.pos + 2, state.posMax)
    end = closing + 2 if closing >= 0 else state.pos + 2
    if not silent:
        state.pending += state.src[state.pos : end]
    state.pos = end
    return True


def _flatten(tokens: Iterable[Token]) -> Iterator[Token]:
    for token in tokens:
        yield token
        yield from _flatten(token.children or ())
