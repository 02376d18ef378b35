"""`/v1/files`: wire types of files, in OpenAI's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.schema import doc, object_schema
from syringa.errors import InvalidRequest

MIN_SECONDS, MAX_SECONDS = 3600, 2592000  # an hour, 30 days
MAX_FILENAME = 255
UPLOAD_PURPOSE: Final = "batch"
PURPOSES = ("batch", "batch_output")

_EXPIRY_SCHEMA = object_schema(
    ("anchor", "seconds"),
    anchor={"const": "created_at", "description": "The time from which on the seconds count."},
    seconds={
        "type": "integer",
        "minimum": MIN_SECONDS,
        "maximum": MAX_SECONDS,
        "description": "How long the file is kept.",
    },
)
ExpiryField = Annotated[dict[str, Any], Meta(extra_json_schema=_EXPIRY_SCHEMA)] | None


class UploadFileRequest(msgspec.Struct, kw_only=True):
    """The form of `POST /v1/files`."""

    file: Annotated[str, doc("The file: JSON lines, one request in each.", format="binary")]
    purpose: Annotated[str, doc("`batch`: other purposes are refused.", const=UPLOAD_PURPOSE)]
    expires_after: Annotated[
        ExpiryField,
        doc("When the file is deleted. In a form, `expires_after[anchor]` and `expires_after[seconds]`."),
    ] = None


class ExpiresAfter(msgspec.Struct):
    """When a file is deleted."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=MIN_SECONDS, le=MAX_SECONDS)]


class FileObject(msgspec.Struct, kw_only=True):
    """What is known of a file."""

    id: str
    object: Annotated[str, doc("`file`.", const="file")] = "file"
    bytes: Annotated[int, doc("The size of the file.")]
    created_at: Annotated[int, doc("Unix time in seconds.")]
    expires_at: Annotated[int | None, doc("When the file is deleted; null: never.")]
    filename: str
    purpose: Annotated[str, doc("`batch` or `batch_output`.")]
    status: Annotated[str, doc("`processed`.", const="processed")] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """A page of files."""

    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[FileObject]
    first_id: Annotated[str | None, doc("Null if the list is empty.")]
    last_id: Annotated[str | None, doc("Null if the list is empty.")]
    has_more: bool


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: Annotated[str, doc("`file`.", const="file")] = "file"
    deleted: bool = True


class UploadFields(msgspec.Struct, frozen=True):
    """The fields of an upload, apart from the file."""

    expires_seconds: int | None
    ignored: list[str]


def read_expiry(value: Any, param: str) -> int | None:
    """Return the seconds of an `expires_after` object. Raises `InvalidRequest`."""
    return None if value is None else convert(value, ExpiresAfter, path=param).seconds


def read_upload_fields(fields: dict[str, str]) -> UploadFields:
    """Validate the text fields of an upload. Raises `InvalidRequest`."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise InvalidRequest("Missing required parameter: 'purpose'.", param="purpose")
    if purpose != UPLOAD_PURPOSE:
        raise InvalidRequest(
            f"purpose: expected {UPLOAD_PURPOSE!r}, not {purpose[:40]!r}: this server runs batches, and has no other"
            " use for files.",
            param="purpose",
        )
    expiry: dict[str, Any] = {}
    ignored = []
    for name, text in fields.items():
        if name == "expires_after" and text:
            expiry |= _read_json_expiry(text)
        elif name == "expires_after[anchor]":
            expiry["anchor"] = text
        elif name == "expires_after[seconds]":
            expiry["seconds"] = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else text
        elif name not in ("purpose", "expires_after"):
            ignored.append(name)
    return UploadFields(read_expiry(expiry or None, "expires_after"), ignored)


def _read_json_expiry(text: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text.encode("utf-8", "replace"), type=dict[str, Any] | None)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise InvalidRequest("expires_after: expected an object.", param="expires_after") from None
    return found or {}
