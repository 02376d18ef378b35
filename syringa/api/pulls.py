"""Wire types of `/admin/models/pull` and `/admin/models/pulls`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from syringa.api.fields.schema import doc


class ModelPullRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /admin/models/pull`."""

    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=300)],
        doc("A name of `/admin/models/available`, or `ORGANIZATION/REPOSITORY:Q4_K_M` of the Hugging Face Hub."),
    ]
    id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=256)] | None,
        doc("Id under which it is served. Default: its name."),
    ] = None


class PullFile(msgspec.Struct, kw_only=True):
    """A file of a pull."""

    name: str
    bytes: int
    completed_bytes: int


class PullEntry(msgspec.Struct, kw_only=True):
    """A download of a model."""

    object: Annotated[str, doc("`pull`.", const="pull")] = "pull"
    id: str
    model: Annotated[str, doc("What is downloaded.")]
    serve_as: Annotated[str, doc("Id under which it is served when it is here.")]
    status: Annotated[str, doc("How it goes.", enum=["running", "completed", "failed", "cancelled"])]
    stage: Annotated[str | None, doc("`resolving`, `downloading` or `adding`; null when it has ended.")]
    completed_bytes: Annotated[int, doc("Bytes that are here.")]
    total_bytes: Annotated[int | None, doc("Bytes of all files; null until they are known.")]
    bytes_per_second: Annotated[float | None, doc("Speed in the last 10 seconds.")]
    files: Annotated[list[PullFile], doc("Files that were begun.")]
    error: Annotated[str | None, doc("Why it failed.")]
    created_at: Annotated[int, doc("Unix time in seconds.")]
    updated_at: Annotated[int, doc("Unix time in seconds.")]
    ended_at: Annotated[int | None, doc("Unix time in seconds; null while it is running.")]


class PullList(msgspec.Struct, kw_only=True):
    object: Annotated[str, doc("`list`.", const="list")] = "list"
    data: list[PullEntry]
