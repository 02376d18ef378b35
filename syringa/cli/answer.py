"""Printing of an answer while it is generated: as Markdown in a terminal, as it is elsewhere."""

from __future__ import annotations

import shutil
import time

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from syringa.cli.markdown import AnswerMarkdown
from syringa.cli.source import TextChunk
from syringa.cli.word_wrap import WordWrapper

_REFRESH_SECONDS = 0.1
_MAX_LIVE_LINES = 12  # a block that is longer is shown by its end until it is complete


class AnswerTimes(msgspec.Struct):
    """What the line below an answer reports."""

    started: float
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0

    def describe(self) -> str:
        rate = (self.tokens - 1) / (self.ended - self.first) if self.tokens > 1 and self.ended > self.first else 0.0
        wait = (self.first or self.ended) - self.started
        return f"{self.tokens} tokens, {rate:.1f} tokens/s, first token after {wait:.2f} s"


class AnswerPrinter:
    """Prints the chunks of one answer.

    Blocks of Markdown are formatted when they are complete, in a terminal that can; others wrap words only. Reasoning
    goes to the same terminal. Where the output is a pipe or a file, it goes to standard error, and the answer is alone.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._markdown = console.is_terminal and not console.is_dumb_terminal
        self._words = WordWrapper() if console.is_dumb_terminal else None
        self._aside = console if console.is_terminal else Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._shown = 0.0
        self._block = ""
        self._reasoning: WordWrapper | None = None
        self.text = ""
        self.times = AnswerTimes(time.perf_counter())

    def __enter__(self) -> AnswerPrinter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._reasoning is not None:
            self._finish_reasoning()
            self._aside.print()
        self._finish_block()
        if self._words is not None:
            self._write(self._words.flush(_width(self._console)))
            if self.text and not self.text.endswith("\n"):
                self._write("\n")
        self.times.ended = time.perf_counter()

    def feed(self, chunk: TextChunk) -> None:
        if chunk.tokens is not None:
            self.times.tokens = chunk.tokens
            return
        self.times.first = self.times.first or time.perf_counter()
        if chunk.reasoning:
            self._reasoning = self._reasoning or WordWrapper()
            wrapped = self._aside.is_terminal
            self._print_reasoning(self._reasoning.feed(chunk.text, _width(self._aside)) if wrapped else chunk.text)
            return
        if self._reasoning is not None:
            self._finish_reasoning()
            self._aside.print("\n")
        self.text += chunk.text
        if not self._markdown:
            self._write(self._words.feed(chunk.text, _width(self._console)) if self._words else chunk.text)
            return
        self._block += chunk.text
        complete, self._block = split_blocks(self._block)
        if complete:
            self._clear()
            self._console.print(AnswerMarkdown(complete))
            self._console.print()
        self._show_incomplete()

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()

    def _print_reasoning(self, text: str) -> None:
        self._aside.print(text, style="dim", end="", markup=False, soft_wrap=True)

    def _finish_reasoning(self) -> None:
        if self._reasoning is not None:
            self._print_reasoning(self._reasoning.flush(_width(self._aside)))
            self._reasoning = None

    def _show_incomplete(self) -> None:
        now = time.perf_counter()
        if not self._block or now - self._shown < _REFRESH_SECONDS:
            return
        self._shown = now
        if self._live is None:
            self._live = Live(console=self._console, transient=True, auto_refresh=False, vertical_overflow="crop")
            self._live.start()
        lines = Text(self._block.rstrip()).wrap(self._console, self._console.width)
        self._live.update(Text("\n").join(lines[-_MAX_LIVE_LINES:]), refresh=True)

    def _finish_block(self) -> None:
        self._clear()
        if self._markdown and self._block.strip():
            self._console.print(AnswerMarkdown(self._block))
        self._block = ""

    def _clear(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _width(console: Console) -> int:
    """Return the columns of a terminal. rich takes 80 for those of every dumb one."""
    return shutil.get_terminal_size().columns if console.is_dumb_terminal else console.width


def split_blocks(text: str) -> tuple[str, str]:
    """Return the blocks of Markdown that are complete, and the rest. A block ends with an empty line.

    Code between fences is one block. So is a list, whose items may be separated by empty lines: numbering and
    indentation depend on what comes before.
    """
    fence = ""
    end = position = 0
    previous_empty = False
    # At "\n" alone: `splitlines` would also split at characters such as U+2028, which end no line of Markdown.
    for line in text.split("\n")[:-1]:
        stripped = line.strip(" \t\r")
        if not fence and previous_empty and stripped and not _continues_list(line):
            end = position
        if stripped.startswith(("```", "~~~")):
            mark = stripped[0] * (len(stripped) - len(stripped.lstrip(stripped[0])))
            if not fence:
                fence = mark
            elif stripped.startswith(fence) and stripped == mark:
                fence = ""
        previous_empty = not stripped
        position += len(line) + 1
    return text[:end], text[end:]


def _continues_list(line: str) -> bool:
    stripped = line.lstrip()
    return line != stripped or stripped[:2] in ("- ", "* ", "+ ") or stripped.split(".", 1)[0].isdigit()
