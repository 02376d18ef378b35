from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.output.detokenizer import TextSegment, plain_text
from syringa.output.stop_strings import StopStringMatcher

LETTERS = st.text(alphabet="ab]^", max_size=14)


def reference(text: str, stops: list[str]) -> tuple[str, str | None, int]:
    """Return the remaining text, the match and the characters consumed, by brute force."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop, end
    return text, None, len(text)


def feed_all(stop: StopStringMatcher, segments: list[TextSegment]) -> list[TextSegment]:
    return [out for segment in segments for out in stop.feed([segment])] + stop.flush()


@given(st.lists(LETTERS, max_size=6), st.lists(LETTERS.filter(bool), min_size=1, max_size=4))
@settings(max_examples=500, deadline=None)
def test_match_is_independent_of_splits(chunks: list[str], stops: list[str]) -> None:
    text = "".join(chunks)
    expected, matched, end = reference(text, stops)
    by_segment = StopStringMatcher(stops)
    out = feed_all(by_segment, [TextSegment(chunk) for chunk in chunks])
    assert (plain_text(out), by_segment.matched) == (expected, matched)
    by_character = StopStringMatcher(stops)
    out = feed_all(by_character, [TextSegment(character) for character in text])
    assert (plain_text(out), by_character.matched, by_character.consumed) == (expected, matched, end)
    if matched is None:
        assert sum(segment.tokens for segment in out) == len(text)
    at_once = StopStringMatcher(stops)
    assert plain_text(at_once.feed([TextSegment(chunk) for chunk in chunks]) + at_once.flush()) == expected


@given(LETTERS, st.lists(LETTERS.filter(bool), min_size=1, max_size=4), LETTERS, LETTERS)
@settings(max_examples=300, deadline=None)
def test_released_text_is_final(text: str, stops: list[str], one: str, other: str) -> None:
    """The text released so far is a prefix of the result for any continuation."""
    stop = StopStringMatcher(stops)
    sent = plain_text(stop.feed([TextSegment(text)]))
    for future in (one, other, *stops):
        assert reference(text + future, stops)[0].startswith(sent)


@given(
    st.lists(st.one_of(LETTERS, st.none()), max_size=8),
    st.lists(LETTERS.filter(bool), min_size=1, max_size=3),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_special_tokens_keep_their_position(chunks: list[str | None], stops: list[str], together: bool) -> None:
    segments = [TextSegment("<m>", 1, True, 7) if chunk is None else TextSegment(chunk) for chunk in chunks]
    stop = StopStringMatcher(stops)
    out = stop.feed(segments) + stop.flush() if together else feed_all(stop, segments)
    whole = "".join("\0" if segment.special else segment.text for segment in segments)
    shown = "".join("\0" if segment.special else segment.text for segment in out)
    assert shown == whole[: len(shown)]
    assert shown.replace("\0", "") == reference(whole.replace("\0", ""), stops)[0]
    if stop.matched is None:
        assert shown == whole


def test_text_is_held_until_decided() -> None:
    stop = StopStringMatcher(["\n\nUser:"])
    assert stop.feed([TextSegment("Hi\n")]) == [TextSegment("Hi")]
    assert stop.feed([TextSegment("\nUse")]) == []
    assert stop.feed([TextSegment(" it")]) == [TextSegment("\n", 0), TextSegment("\nUse"), TextSegment(" it")]
    assert stop.flush() == []
    assert stop.consumed == 3


def test_match_ends_the_text() -> None:
    stop = StopStringMatcher(["END"])
    assert stop.feed([TextSegment("a E"), TextSegment("N")]) == [TextSegment("a ")]
    assert stop.feed([TextSegment("D and"), TextSegment(" more")]) == []
    assert (stop.matched, stop.consumed) == ("END", 3)
    assert stop.feed([TextSegment("after")]) == []
    assert stop.flush() == []
    assert stop.consumed == 3


def test_flush_returns_held_text() -> None:
    stop = StopStringMatcher(["END"])
    assert stop.feed([TextSegment("E", 1), TextSegment("N", 2)]) == []
    assert stop.flush() == [TextSegment("E", 1), TextSegment("N", 2)]


@pytest.mark.parametrize(
    ("stops", "text", "left", "matched"),
    [
        (["abcd", "bc"], "abcd", "a", "bc"),  # the first that is complete
        (["bc", "abc"], "abc", "", "abc"),  # of those that are complete together, the longest
        (["b", "ab"], "aab", "a", "ab"),
        (["aab"], "aaab", "a", "aab"),
        (["^]\\-"], "a^]\\-", "a", "^]\\-"),
        (["停止"], "请停止吧", "请", "停止"),
    ],
)
def test_first_complete_then_longest_stop_string_wins(stops: list[str], text: str, left: str, matched: str) -> None:
    stop = StopStringMatcher(stops)
    assert plain_text(stop.feed([TextSegment(text)])) == left
    assert stop.matched == matched


def test_special_token_may_be_a_stop_string() -> None:
    stop = StopStringMatcher(["<|im_end|>"])
    assert stop.feed([TextSegment("a <"), TextSegment("<|im_end|>", 1, True, 2), TextSegment("b")]) == [
        TextSegment("a "),
        TextSegment("<", 0),
    ]
    assert (stop.matched, stop.consumed) == ("<|im_end|>", 2)


def test_no_stop_strings_pass_everything() -> None:
    stop = StopStringMatcher([])
    assert stop.feed([TextSegment("a"), TextSegment("b", 2)]) == [TextSegment("a"), TextSegment("b", 2)]
    assert (stop.matched, stop.consumed) == (None, 3)


def test_long_stop_strings_are_fast() -> None:
    stop = StopStringMatcher(["a" * 20_000 + "b"])
    start = time.process_time()
    feed_all(stop, [TextSegment("aaaa")] * 20_000)
    assert time.process_time() - start < 3
