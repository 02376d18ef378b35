"""Decoding of bodies: the number of values and their depth are bounded before any of them takes memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.api import decoding
from syringa.api.decoding import decode_object
from syringa.errors import InvalidRequest, PayloadTooLarge
from tests.tiers import examples

_JSON = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('a"\\{[,')),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.sampled_from('b"\\{[')), inner),
)


def count_values(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(count_values, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(count_values, value))
    return int(isinstance(value, str))


@settings(deadline=None, max_examples=examples(200))
@given(st.dictionaries(st.text(st.sampled_from('c"\\')), _JSON), st.integers(1, 40), st.integers(1, 9))
def test_body_is_refused_by_the_number_of_its_strings_objects_and_arrays(
    body: dict[str, Any], limit: int, scanned: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "MAX_VALUES", limit)
        patch.setattr(decoding, "_SCANNED_BYTES", scanned)
        raw = json.dumps(body, separators=(",", ":")).encode()
        if count_values(body) <= limit:
            assert decode_object(raw) == body
        else:
            with pytest.raises(PayloadTooLarge, match=f"more than {limit} strings"):
                decode_object(raw)


def test_body_of_a_million_messages_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_decoder", None)
    body = b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 300_000) + b"]}"
    with pytest.raises(PayloadTooLarge):
        decode_object(body)


def test_body_with_a_long_text_full_of_brackets_is_accepted() -> None:
    text = '{"a": ["b\\c"]}' * 200_000
    assert decode_object(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_body_is_refused_by_its_depth(opening: str, closing: str) -> None:
    def body(depth: int) -> bytes:
        return ('{"x": ' + opening * (depth - 1) + "1" + closing * (depth - 1) + "}").encode()

    assert decode_object(body(decoding.MAX_DEPTH))
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        decode_object(body(decoding.MAX_DEPTH + 1))


@settings(deadline=None, max_examples=examples(200))
@given(_JSON)
def test_depth_of_a_body_is_that_of_its_values(value: Any) -> None:
    text = json.dumps({"x": value}, ensure_ascii=False).encode()
    depth = depth_of({"x": value})
    with pytest.MonkeyPatch.context() as patch:
        for limit in (depth - 1, depth):
            patch.setattr(decoding, "MAX_DEPTH", limit)
            assert decoding._is_too_deep(text + b" " * 100) is (limit < depth)


def depth_of(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)
