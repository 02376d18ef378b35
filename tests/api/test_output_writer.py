"""Tests of `TextChunkEncoder`."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from syringa.api.completions.writer import Choice, Completion
from syringa.api.output_writer import TextChunkEncoder


@given(st.lists(st.tuples(st.integers(0, 3), st.text()), max_size=8), st.text(max_size=8))
def test_text_chunk_encoder_equals_plain_encoding(parts: list[tuple[int, str]], model: str) -> None:
    def make(choice: int, text: str) -> Completion:
        return Completion("cmpl-1", "text_completion", 7, model, "fp_1", [Choice(choice, text)], None)

    write = TextChunkEncoder(make)
    for choice, text in parts:
        assert bytes(write(choice, text)) == msgspec.json.encode(make(choice, text))
