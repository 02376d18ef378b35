from __future__ import annotations

import io
import json

import pytest

from syringa.service.batches.lines import (
    READ_BYTES,
    BatchLine,
    InputLine,
    LineProblem,
    custom_id_of,
    parse_line,
    read_lines,
    response_line,
)

ENDPOINT = "/v1/chat/completions"
LONGEST = 100


async def read(content: bytes) -> list[InputLine]:
    return [line async for line in read_lines(io.BytesIO(content), LONGEST)]


def parse(content: bytes) -> BatchLine | LineProblem:
    return parse_line(InputLine(3, content), ENDPOINT, LONGEST)


def line(body: bytes = b"{}", custom_id: bytes = b'"a"') -> bytes:
    return b'{"custom_id": %b, "method": "POST", "url": "/v1/chat/completions", "body": %b}' % (custom_id, body)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"a", [(1, b"a")]),
        (b"a\nb\n", [(1, b"a"), (2, b"b")]),
        (b"a\r\n\r\n  \nb\r\n", [(1, b"a"), (4, b"b")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb", [(1, b"a"), (2, b"\xef\xbb\xbfb")]),
        (b"x" * LONGEST + b"\n" + b"y" * LONGEST, [(1, b"x" * LONGEST), (2, b"y" * LONGEST)]),
        (b"a\n" + b"x" * (LONGEST + 1) + b"\nb", [(1, b"a"), (2, None), (3, b"b")]),
        (b"x" * (3 * READ_BYTES), [(1, None)]),
    ],
    ids=["empty", "no newline", "lines", "blank lines", "byte order mark", "longest", "too long", "one long line"],
)
async def test_lines_of_a_file_are_read_with_their_numbers(
    content: bytes, expected: list[tuple[int, bytes | None]]
) -> None:
    assert await read(content) == expected


async def test_blank_lines_of_any_number_do_not_end_a_file() -> None:
    blank = READ_BYTES + 10
    assert await read(b"a\n" + b"\n" * blank + b"b") == [(1, b"a"), (blank + 2, b"b")]


async def test_file_of_many_reads_has_all_its_lines() -> None:
    lines = await read(b"".join(b"%d\n" % number for number in range(5000)))
    assert lines == [(number + 1, b"%d" % number) for number in range(5000)]


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"\xff\xfe", "invalid_json_line"),
        (line(custom_id=b'"\xff"'), "invalid_json_line"),
        (line(custom_id=b'"\\ud800"'), "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (b"[]", "invalid_json_line"),
        (line(b"[1]"), "invalid_type"),
        (line(b'{"stream": true}'), "unsupported_parameter"),
        (line(b'{"background": true}'), "unsupported_parameter"),
        (line(custom_id=b'""'), "invalid_custom_id"),
        (line(custom_id=b"1"), "invalid_custom_id"),
        (line(custom_id=b'"%b"' % (b"x" * 513)), "invalid_custom_id"),
    ],
)
def test_line_that_cannot_be_run_has_a_problem(content: bytes, code: str) -> None:
    found = parse(content)
    assert isinstance(found, LineProblem)
    assert (found.code, found.line) == (code, 3)
    custom_id_of(InputLine(3, content))  # is read as far as possible, and never fails


@pytest.mark.parametrize(
    ("body", "model"),
    [(b'{"model": "m", "stream": false}', "m"), (b'{"model": 1}', None), (b'{"model": "%b"}' % (b"x" * 300), None)],
)
def test_model_of_a_line_is_known_if_it_can_be_one(body: bytes, model: str | None) -> None:
    assert parse(line(body)) == BatchLine("a", body, model)


def test_custom_id_is_written_as_it_was_read() -> None:
    custom_id = '\x00 é \u2028 \\ " 🜁'
    found = parse(line(custom_id=json.dumps(custom_id).encode()))
    assert isinstance(found, BatchLine)
    written = response_line("id", found.custom_id, 200, "id", b"{}")
    assert json.loads(written)["custom_id"] == custom_id
    assert "\n" not in written


def test_response_line_names_ignored_fields_if_there_are_any() -> None:
    named, plain = (json.loads(response_line("id", "a", 200, "id", b"{}", each)) for each in ("color, seed", ""))
    assert named["response"] == {"status_code": 200, "request_id": "id", "body": {}, "ignored": "color, seed"}
    assert plain["response"] == {"status_code": 200, "request_id": "id", "body": {}}
