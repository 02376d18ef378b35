"""The lines of a batch: reading the input file line by line, and the lines of the output and error files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, BinaryIO, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from syringa.errors import StoreUnavailable

READ_BYTES = 1 << 20  # read at a time, in a thread
_READ_LINES = 256
_MAX_ID = 512
_MAX_MODEL = 256  # characters: a longer name is that of no model
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

INVALID_JSON = "invalid_json_line"
EMPTY_FILE = "empty_file"


class InputLine(NamedTuple):
    """A line that is not blank. `data` is None if it is too long."""

    number: int  # from 1
    data: bytes | None


class LineProblem(msgspec.Struct, frozen=True, omit_defaults=False):
    """Why a line, or the whole file, cannot be run. Also an entry of a batch's `errors`."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchLine(msgspec.Struct, frozen=True):
    """A line that can be run."""

    custom_id: str
    body: bytes
    model: str | None


class _WireLine(msgspec.Struct):
    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw()


class _WireBody(msgspec.Struct):
    model: Any = None
    stream: Any = None
    background: Any = None


class _WireId(msgspec.Struct):
    custom_id: Any = None


_decode_line = msgspec.json.Decoder(_WireLine).decode
_decode_body = msgspec.json.Decoder(_WireBody).decode
_decode_id = msgspec.json.Decoder(_WireId).decode
_encode = msgspec.json.Encoder().encode


async def read_lines(file: BinaryIO, max_bytes: int) -> AsyncIterator[InputLine]:
    """Yield the lines of a file that are not blank. A line of more than `max_bytes` is skipped, not loaded.

    Raises `StoreUnavailable` if the file cannot be read now.
    """
    reader = _LineReader(file, max_bytes)
    while not reader.ended:
        for line in await asyncio.to_thread(reader.read):
            yield line


class _LineReader:
    def __init__(self, file: BinaryIO, max_bytes: int) -> None:
        self._file, self._max_bytes = file, max_bytes
        self._number = 0
        self.ended = False

    def read(self) -> list[InputLine]:
        """Return the next lines, about `READ_BYTES` of them. There may be none before the end: blank ones count."""
        try:
            return self._read()
        except OSError as error:
            raise StoreUnavailable(f"The input file cannot be read: {error.strerror}.") from error

    def _read(self) -> list[InputLine]:
        lines: list[InputLine] = []
        size = 0
        while len(lines) < _READ_LINES and size < READ_BYTES:
            data = self._file.readline(self._max_bytes + 1)
            if not data:
                self.ended = True
                break
            self._number += 1
            if self._number == 1:
                data = data.removeprefix(_BYTE_ORDER_MARK)
            if len(data) > self._max_bytes and not data.endswith(b"\n"):
                while (rest := self._file.readline(READ_BYTES)) and not rest.endswith(b"\n"):
                    pass
                lines.append(InputLine(self._number, None))
                continue
            size += len(data)
            if stripped := data.strip():
                lines.append(InputLine(self._number, stripped))
        return lines


def parse_line(line: InputLine, endpoint: str, max_bytes: int) -> BatchLine | LineProblem:
    """Return what a line asks for, or why it cannot be run. The body is checked when it is run."""
    if line.data is None:
        message = f"The line is longer than {max_bytes} bytes, the limit of a request to this server."
        return LineProblem("line_too_long", message, None, line.number)
    try:
        wire = _decode_line(line.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return LineProblem(INVALID_JSON, "This line is not parseable as valid JSON.", None, line.number)
    problem = _find_problem(wire, endpoint)
    if problem is not None:
        code, message, param = problem
        return LineProblem(code, message, param, line.number)
    model = _decode_body(wire.body).model
    named = isinstance(model, str) and len(model) <= _MAX_MODEL
    return BatchLine(wire.custom_id, bytes(wire.body), model if named else None)


def _find_problem(wire: _WireLine, endpoint: str) -> tuple[str, str, str] | None:
    """Return the code, the message and the field of the first problem of a line."""
    for name in ("custom_id", "method", "url"):
        if getattr(wire, name) is None:
            return "missing_required_parameter", f"Missing required parameter: '{name}'.", name
    if not isinstance(wire.custom_id, str) or not 0 < len(wire.custom_id) <= _MAX_ID:
        message = f"custom_id: expected a text of 1 to {_MAX_ID} characters."
        return "invalid_custom_id", message, "custom_id"
    if wire.method != "POST":
        return "invalid_method", "The method must be POST.", "method"
    if wire.url != endpoint:
        return "invalid_url", f"The URL must be {endpoint}, the endpoint of the batch.", "url"
    if not bytes(wire.body):
        return "missing_required_parameter", "Missing required parameter: 'body'.", "body"
    try:
        body = _decode_body(wire.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "invalid_type", "body: expected an object.", "body"
    for name in ("stream", "background"):
        if getattr(body, name):
            return "unsupported_parameter", f"{name}: not supported in a batch.", f"body.{name}"
    return None


def custom_id_of(line: InputLine) -> str | None:
    """Return the custom id of a line, as far as it can be read."""
    if line.data is None:
        return None
    try:
        found = _decode_id(line.data).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found[:_MAX_ID] if isinstance(found, str) else None


class _LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw
    ignored: str | UnsetType = UNSET


class _LineError(msgspec.Struct):
    code: str
    message: str


class _OutputLine(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _LineResponse | None
    error: _LineError | None


def response_line(id: str, custom_id: str, status: int, request_id: str, body: bytes, ignored: str = "") -> str:
    """Return a line of the output file, or of the error file for a request that was refused or has failed."""
    response = _LineResponse(status, request_id, msgspec.Raw(body), ignored or UNSET)
    return _encode(_OutputLine(id, custom_id, response, None)).decode()


def error_line(id: str, custom_id: str | None, code: str, message: str) -> str:
    """Return a line of the error file for a line that was not run."""
    return _encode(_OutputLine(id, custom_id, None, _LineError(code, message))).decode()


def line_id(batch: str, number: int) -> str:
    """Return the id of a line's request: always the same, so that its usage is recorded once."""
    return f"batch_req_{batch.removeprefix('batch_')}_{number}"
