from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.modelfiles import ModelDescription, locate
from syringa.modelfiles.tokenizer import tokenizer_from_gguf
from syringa.output.detokenizer import Detokenizer, TextSegment, plain_text
from syringa.prompt.tokens.tokenizer import Tokenizer
from tests.tiers import examples

SPM_METADATA = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_spm.json").read_text())["metadata"]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    return Tokenizer.load(locate("default"))


@pytest.fixture(scope="module")
def spm() -> Tokenizer:
    description = ModelDescription(name="m", architecture="X", config={}, max_model_len=8, end_tokens=frozenset())
    return Tokenizer(tokenizer_from_gguf(SPM_METADATA), description)


def run(detokenizer: Detokenizer, tokens: list[int], splits: list[int]) -> list[TextSegment]:
    segments: list[TextSegment] = []
    bounds = sorted({0, len(tokens), *(split % (len(tokens) + 1) for split in splits)})
    for start, end in itertools.pairwise(bounds):
        segments += detokenizer.feed(tokens[start:end])
    return segments + detokenizer.flush()


# Ordinary and special tokens, single bytes of byte-level and byte-fallback vocabularies, and unknown ids.
TOKEN = st.one_of(st.integers(0, 49151), st.integers(0, 20), st.integers(17, 300), st.just(10**6), st.just(-1))


@given(st.lists(TOKEN, max_size=24), st.lists(st.integers(0, 100), max_size=5))
@settings(deadline=None, max_examples=examples(300))
def test_detokenizer_matches_batch_decoding_for_any_split(
    smollm2: Tokenizer, spm: Tokenizer, tokens: list[int], splits: list[int]
) -> None:
    for tokenizer in (smollm2, spm):
        segments = run(Detokenizer(tokenizer, at_start=True), tokens, splits)
        assert plain_text(segments) == tokenizer.decode(tokens)
        assert sum(segment.tokens for segment in segments) == len(tokens)
        assert [segment.token for segment in segments if segment.special] == [
            id_ for id_ in tokens if id_ in tokenizer.special_ids
        ]
        streamed = Detokenizer(tokenizer, at_start=True)
        texts = [streamed.feed_text([token]) for token in tokens]
        assert "".join(texts) + plain_text(streamed.flush()) == tokenizer.decode(tokens)
        shown = run(Detokenizer(tokenizer, at_start=True, show_special=True), tokens, splits)
        assert plain_text(shown) == tokenizer.decode(tokens, skip_special=False)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\u2581")))  # SentencePiece's space
def test_detokenizer_emits_complete_characters(spm: Tokenizer, text: str) -> None:
    tokens = spm.encode(text, add_special=False, parse_special=False)
    detokenizer = Detokenizer(spm, at_start=True)
    segments = [segment for token in tokens for segment in detokenizer.feed([token])]
    assert plain_text(detokenizer.flush()) == ""
    assert plain_text(segments) == text
    assert ("\ufffd" in plain_text(segments)) == ("\ufffd" in text)


def byte(smollm2: Tokenizer, value: int) -> int:
    return smollm2.bytes_table.index(bytes([value]))


def test_character_of_several_tokens_is_one_segment(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    tokens = [byte(smollm2, value) for value in "ñ€".encode()]
    assert [detokenizer.feed([token]) for token in tokens] == [[], [TextSegment("ñ", 2)], [], [], [TextSegment("€", 3)]]


def test_invalid_utf8_becomes_replacement_characters(smollm2: Tokenizer) -> None:
    detokenizer = Detokenizer(smollm2)
    a = smollm2.encode("a")[0]
    assert detokenizer.feed([byte(smollm2, 0xE2), byte(smollm2, 0x82)]) == []
    assert detokenizer.feed([a]) == [TextSegment("\ufffda", 3)]
    assert detokenizer.feed([byte(smollm2, 0x82)]) == [TextSegment("\ufffd", 1)]
    assert detokenizer.feed([byte(smollm2, 0xE2)]) == []
    assert detokenizer.flush() == [TextSegment("\ufffd", 1)]
    assert detokenizer.flush() == []


def test_special_tokens_are_separate_segments(smollm2: Tokenizer) -> None:
    tokens = smollm2.encode("a<|im_end|>b")
    segments = Detokenizer(smollm2).feed(tokens)
    assert segments == [TextSegment("a"), TextSegment("<|im_end|>", 1, True, 2), TextSegment("b")]
    assert plain_text(Detokenizer(smollm2, show_special=True).feed(tokens)) == "a<|im_end|>b"
    interrupted = Detokenizer(smollm2).feed([byte(smollm2, 0xE2), 2, byte(smollm2, 0x82)])
    assert [segment.text for segment in interrupted] == ["\ufffd", "<|im_end|>", "\ufffd"]


def test_leading_space_is_removed_only_at_the_start(smollm2: Tokenizer, spm: Tokenizer) -> None:
    tokens = spm.encode("Hello the", add_special=False)
    assert plain_text(Detokenizer(spm).feed(tokens)) == " Hello the"  # continues a prompt
    assert plain_text(Detokenizer(spm, at_start=True).feed(tokens)) == "Hello the"
    assert plain_text(Detokenizer(smollm2, at_start=True).feed(smollm2.encode(" a"))) == " a"


def test_detokenizer_is_fast(smollm2: Tokenizer) -> None:
    tokens = smollm2.encode("The quick brown fox, 1 2 3, jumps over the lazy dog. " * 100)
    detokenizer = Detokenizer(smollm2)
    detokenizer.feed(tokens)
    start = time.process_time()
    for token in tokens:
        detokenizer.feed([token])
    assert (time.process_time() - start) / len(tokens) < 20e-6  # about 0.4 µs on an idle machine
