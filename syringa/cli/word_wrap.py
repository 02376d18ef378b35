"""Word wrap of text that is printed while it is generated."""

from __future__ import annotations

import re

from rich.cells import cell_len

# Chinese, Japanese and Korean characters: a line may end after each of them.
_WIDE = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\U00020000-\U0003fffd"
)
_PIECES = re.compile(rf"\n|[^\S\n]+|[{_WIDE}]|[^\s{_WIDE}]+")
_UNFINISHED_WORD = re.compile(rf"[^\s{_WIDE}]*\Z")


class WordWrapper:
    """Breaks lines between words. A word is held back until its end has come, or it fills a line."""

    def __init__(self) -> None:
        self._word = ""
        self._space = ""  # before the next word; dropped at the end of a line
        self._column = 0

    def feed(self, text: str, width: int) -> str:
        """Return what can be printed now, on lines of `width` columns."""
        text = self._word + text
        unfinished = _UNFINISHED_WORD.search(text)
        assert unfinished is not None
        self._word = unfinished[0] if cell_len(unfinished[0]) < width else ""
        return self._wrap(text[: len(text) - len(self._word)], width)

    def flush(self, width: int) -> str:
        """Return the rest of the text."""
        word, self._word = self._word, ""
        return self._wrap(word, width)

    def _wrap(self, text: str, width: int) -> str:
        printed = ""
        for piece in _PIECES.findall(text):
            if piece == "\n":
                printed, self._column, self._space = printed + piece, 0, ""
            elif piece.isspace():
                self._space += piece.replace("\t", "    ")
            else:
                columns = cell_len(piece)
                if self._column and self._column + len(self._space) + columns > width:
                    printed, self._column, self._space = printed + "\n", 0, ""
                printed += self._space + piece
                self._column += len(self._space) + columns
                self._space = ""
        return printed
