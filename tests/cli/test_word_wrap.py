from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from syringa.cli.word_wrap import WordWrapper


def wrap(*pieces: str, width: int = 10) -> str:
    wrapper = WordWrapper()
    return "".join(wrapper.feed(piece, width) for piece in pieces) + wrapper.flush(width)


@pytest.mark.parametrize(
    ("text", "wrapped"),
    [
        ("one two three", "one two\nthree"),
        ("one two th ", "one two th"),
        ("a\n\n  b  c", "a\n\n  b  c"),
        ("\tcode = 1234", "    code =\n1234"),
        ("abcdefghijklmno p", "abcdefghijklmno\np"),
        ("ab abcdefghijkl", "ab\nabcdefghijkl"),
        ("你好世界你好世界", "你好世界你\n好世界"),
    ],
)
def test_lines_break_between_words(text: str, wrapped: str) -> None:
    assert wrap(text) == wrapped
    if max(map(len, text.split())) <= 10:  # longer words are broken where their pieces end
        assert wrap(*text) == wrapped


def test_word_is_held_back_until_it_ends_or_fills_a_line() -> None:
    wrapper = WordWrapper()
    assert [wrapper.feed(piece, 10) for piece in ("on", "e tw", "o", " three", "fourfive", "six")] == [
        "", "one", "", " two", "\nthreefourfive", "",
    ]  # fmt: skip
    assert wrapper.flush(10) == "\nsix"


@given(st.lists(st.text(alphabet="ab \n你", max_size=8), max_size=12))
def test_words_stay_whole_and_fit(pieces: list[str]) -> None:
    text = "".join(pieces)
    wrapped = wrap(*pieces, width=20)
    assert "".join(wrapped.split()) == "".join(text.split())
    for line in wrapped.split("\n"):
        assert cell_len(line) <= max([20, *map(len, text.replace("你", " ").split())])
