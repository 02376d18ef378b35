"""Uploads: a multipart form whose file is written to disk as it arrives, never whole in memory."""

from __future__ import annotations

from typing import NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

from syringa.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from syringa.http.context import request_context
from syringa.service.files.storage import FileWriter

FILE_FIELD = "file"
MAX_FORM_BYTES = 1 << 16  # of a form, besides its file
MAX_FIELDS = 32
_MAX_NAME = 256


class UploadedForm(NamedTuple):
    fields: dict[str, str]
    filename: str


def check_upload_size(size: int | None, max_bytes: int) -> None:
    """Raise `PayloadTooLarge` if a form of this size cannot hold a file of at most `max_bytes`. None: not known."""
    if size is not None and size > max_bytes + MAX_FORM_BYTES:
        raise _too_large(max_bytes)


async def read_upload(request: Request, writer: FileWriter, max_bytes: int) -> UploadedForm:
    """Read a form, and write its file. Raises `InvalidRequest`, `PayloadTooLarge` or `UnsupportedMediaType`."""
    context = request_context(request.scope)
    form = _Form(_boundary(context.headers.get(b"content-type", b"")), max_bytes)
    if context.connection is not None:
        context.connection.expect_upload()
    while True:
        message = await request.receive()
        if message["type"] != "http.request":
            raise ClientDisconnect
        for data in form.feed(message.get("body", b"")):
            await writer.write(data)
        if not message.get("more_body"):
            return form.finish()


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"The file is larger than {max_bytes} bytes, the limit of this server.")


def _boundary(content_type: bytes) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        shown = kind.decode("latin-1")[:100] or "nothing"
        raise UnsupportedMediaType(f"The body must be multipart/form-data, not {shown}.")
    boundary = options.get(b"boundary", b"")
    if not boundary:
        raise InvalidRequest("The content type has no boundary.")
    return boundary


class _Form:
    """Callbacks of the parser, and what they have found."""

    def __init__(self, boundary: bytes, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._header_name, self._header_value = b"", b""
        self._disposition = b""
        self._name = ""
        self._text: list[bytes] = []
        self._data: list[bytes] = []  # of the file, since the last `feed`
        self._file_bytes = self._form_bytes = self._parts = 0
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._on_part_begin,
                    "on_header_field": self._on_header_field,
                    "on_header_value": self._on_header_value,
                    "on_header_end": self._on_header_end,
                    "on_headers_finished": self._on_headers_finished,
                    "on_part_data": self._on_part_data,
                    "on_part_end": self._on_part_end,
                    "on_end": self._on_end,
                },
            )
        except FormParserError:
            raise InvalidRequest("The boundary of the form is too long.") from None

    def feed(self, data: bytes) -> list[bytes]:
        """Parse more of the body, and return what it has of the file."""
        if data:
            try:
                self._parser.write(data)
            except FormParserError:
                raise InvalidRequest("The body is not a valid multipart form.") from None
        found, self._data = self._data, []
        return found

    def finish(self) -> UploadedForm:
        if not self._ended:
            raise InvalidRequest("The multipart form is incomplete.")
        if self._filename is None:
            raise InvalidRequest(f"Missing required parameter: '{FILE_FIELD}'.", param=FILE_FIELD)
        return UploadedForm(self._fields, self._filename)

    def _on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_FIELDS:
            raise InvalidRequest(f"The form has more than {MAX_FIELDS} fields.")
        self._disposition, self._text = b"", []

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header_name += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._count(end - start)
        self._header_value += data[start:end]

    def _on_header_end(self) -> None:
        if self._header_name.lower() == b"content-disposition":
            self._disposition = self._header_value
        self._header_name = self._header_value = b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")[:_MAX_NAME]
        if not self._name:
            raise InvalidRequest("A part of the form has no name.")
        if self._name != FILE_FIELD:
            return
        if self._filename is not None:
            raise InvalidRequest("The form has more than one file.", param=FILE_FIELD)
        name = options.get(b"filename", b"").decode("utf-8", "replace").replace("\\", "/").rpartition("/")[2]
        self._filename = "".join(each for each in name if each.isprintable())[:_MAX_NAME] or FILE_FIELD

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name != FILE_FIELD:
            self._count(end - start)
            self._text.append(data[start:end])
            return
        self._file_bytes += end - start
        if self._file_bytes > self._max_bytes:
            raise _too_large(self._max_bytes)
        self._data.append(data[start:end])

    def _on_part_end(self) -> None:
        if self._name != FILE_FIELD:
            self._fields[self._name] = b"".join(self._text).decode("utf-8", "replace")

    def _on_end(self) -> None:
        self._ended = True

    def _count(self, size: int) -> None:
        self._form_bytes += size
        if self._form_bytes > MAX_FORM_BYTES:
            raise PayloadTooLarge(f"The fields of the form are larger than {MAX_FORM_BYTES} bytes.")
