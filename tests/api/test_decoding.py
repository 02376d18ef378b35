"""Decoding of bodies: the number of values is bounded before any of them takes memory."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syringa.api import decoding
from syringa.api.decoding import decode_object
from syringa.errors import PayloadTooLarge
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
