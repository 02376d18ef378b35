from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from syringa.api.responses.listing import PREVIEW_LENGTH, STATUSES, StoredFields, preview, read_stored_fields
from syringa.store import ResponseStatus


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        ({"type": "message", "content": "a\n b"}, "a b"),
        ({"content": [{"type": "input_image"}, {"type": "input_text", "text": "What is it?"}]}, "What is it?"),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ({"type": "function_call", "name": "get", "arguments": '{"a": 1}'}, 'get({"a": 1})'),
        ({"type": "function_call_output", "output": "22"}, "22"),
        ({"type": "function_call_output", "output": [{"type": "input_text", "text": "x"}]}, None),
        ({"type": "reasoning", "summary": []}, None),
        ({"content": ""}, None),
        ({"content": 5}, None),
        ({"content": "x" * 10_000}, "x" * PREVIEW_LENGTH),
    ],
)
def test_preview_is_the_beginning_of_the_text(item: dict[str, Any], expected: str | None) -> None:
    assert preview(json.dumps(item)) == expected


def test_preview_of_nothing() -> None:
    assert preview(None) is None
    assert preview("{") is None


def test_malformed_body_has_no_fields() -> None:
    assert read_stored_fields("{") == StoredFields()
    assert read_stored_fields('{"metadata": {"a": "b"}, "usage": null, "tools": [1]}').metadata == {"a": "b"}


def test_statuses_are_those_of_a_response() -> None:
    assert get_args(ResponseStatus) == STATUSES
