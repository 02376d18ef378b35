from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from syringa.http.uploads import MAX_FORM_BYTES
from syringa.service.files import storage as storage_module
from tests.client import eventually
from tests.http.batch_client import FILES, BatchClient, batch_client, chat_line


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[BatchClient]:
    async with batch_client(tmp_path, file_max_bytes=1000, files_quota_bytes=2500) as http:
        yield http


def on_disk(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "a.db-files").rglob("*") if path.is_file()]


async def test_file_lifecycle(http: BatchClient, tmp_path: Path) -> None:
    uploaded = (await http.upload(b"one\ntwo\n")).json()
    id = uploaded["id"]
    assert uploaded == {
        "id": id,
        "object": "file",
        "bytes": 8,
        "created_at": uploaded["created_at"],
        "expires_at": uploaded["created_at"] + 30 * 86400,
        "filename": "input.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    assert (await http.get(f"{FILES}/{id}")).json() == uploaded
    content = await http.get(f"{FILES}/{id}/content")
    assert content.content == b"one\ntwo\n"
    assert content.headers["content-length"] == "8"
    assert content.headers["content-disposition"] == 'attachment; filename="input.jsonl"'
    head = await http.head(f"{FILES}/{id}/content")
    assert (head.headers["content-length"], head.content) == ("8", b"")
    assert (await http.delete(f"{FILES}/{id}")).json() == {"id": id, "object": "file", "deleted": True}
    for path in (f"{FILES}/{id}", f"{FILES}/{id}/content"):
        gone = await http.get(path)
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "file_not_found")
    assert (await http.delete(f"{FILES}/{id}")).status_code == 404
    assert on_disk(tmp_path) == []


async def test_files_are_listed_in_pages(http: BatchClient) -> None:
    assert (await http.get(FILES)).json() == {
        "object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False
    }  # fmt: skip
    ids = [(await http.upload(b"x")).json()["id"] for _ in range(3)]
    page = (await http.get(FILES, params={"limit": 2, "order": "asc"})).json()
    rest = (await http.get(FILES, params={"limit": 2, "order": "asc", "after": page["last_id"]})).json()
    assert sorted(each["id"] for each in page["data"] + rest["data"]) == sorted(ids)
    assert (page["has_more"], rest["has_more"]) == (True, False)
    assert (await http.get(FILES, params={"purpose": "batch_output"})).json()["data"] == []
    for query, param in (
        ({"purpose": "vision"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"limit": 0}, "limit"),
        ({"order": "up"}, "order"),
    ):
        refused = await http.get(FILES, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert (await http.get(FILES, params={"after": "file-none"})).status_code == 404


@pytest.mark.parametrize(
    "fields",
    [
        {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"},
        {"expires_after": '{"anchor": "created_at", "seconds": 7200}'},
    ],
    ids=["form", "JSON"],
)
async def test_upload_may_say_when_it_expires(http: BatchClient, fields: dict[str, str]) -> None:
    uploaded = (await http.upload(b"x", **fields)).json()
    assert uploaded["expires_at"] - uploaded["created_at"] == 7200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "vision"}, "purpose"),
        ({"expires_after": "tomorrow"}, "expires_after"),
        ({"expires_after": "{}"}, None),
        ({"expires_after[seconds]": "60"}, None),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"}, "expires_after.seconds"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "7200"}, "expires_after.anchor"),
    ],
)
async def test_invalid_fields_of_an_upload_are_refused(
    http: BatchClient, tmp_path: Path, fields: dict[str, Any], param: str | None
) -> None:
    refused = await http.upload(b"x", **fields)
    if fields.get("expires_after") == "{}":
        assert refused.status_code == 200  # as if it were absent
        return
    assert refused.status_code == 400, refused.text
    assert param is None or refused.json()["error"]["param"] == param
    assert on_disk(tmp_path) == []


FORM = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
PURPOSE, END = PART % (b"purpose", b"", b"batch"), b"--x--\r\n"


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"", 400),
        (FORM, b"", 400),
        (FORM, b"nonsense", 400),
        (FORM, PURPOSE + END, 400),
        (FORM, PART % (b"file", b'; filename="a"', b"x") + END, 400),
        (FORM, PURPOSE + PART % (b"file", b'; filename="a"', b"x"), 400),
        (FORM, PURPOSE + 2 * (PART % (b"file", b'; filename="a"', b"x")) + END, 400),
        (FORM, 40 * PURPOSE + END, 400),
        (FORM, PART % (b"purpose", b"", b"x" * 70000) + END, 413),
        (FORM, PURPOSE + PART % (b"file", b'; filename="a"', b"x" * 1001) + END, 413),
        (FORM, PART % (b"", b"", b"x") + END, 400),
    ],
    ids=[
        "JSON", "no boundary", "empty", "no form", "no file", "no purpose", "incomplete", "two files", "many fields",
        "long field", "long file", "no name",
    ],
)  # fmt: skip
async def test_malformed_upload_is_refused_and_leaves_nothing(
    http: BatchClient, tmp_path: Path, content_type: str, body: bytes, status: int
) -> None:
    refused = await http.post(FILES, content=body, headers={"content-type": content_type})
    assert refused.status_code == status, refused.text
    assert refused.json()["error"]["message"]
    assert on_disk(tmp_path) == []
    assert (await http.get(FILES)).json()["data"] == []


async def test_fields_may_follow_the_file_and_unknown_ones_are_named(http: BatchClient) -> None:
    body = PART % (b"file", b'; filename="../a\\b\xc3\xa9.jsonl"', b"x") + PURPOSE + PART % (b"other", b"", b"1") + END
    answer = await http.post(FILES, content=body, headers={"content-type": FORM})
    assert answer.status_code == 200, answer.text
    assert answer.json()["filename"] == "bé.jsonl"
    assert answer.headers["x-syringa-ignored"] == "other"


async def test_quota_of_an_organization_is_enforced(http: BatchClient) -> None:
    for _ in range(2):
        assert (await http.upload(b"x" * 1000)).status_code == 200
    refused = await http.upload(b"x" * 1000)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "storage_quota_exceeded")


async def test_uploads_in_progress_count_against_the_quota(http: BatchClient) -> None:
    complete = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield PART % (b"file", b'; filename="a"', b"x")
        await complete.wait()
        yield PURPOSE + END

    uploads = [asyncio.create_task(http.post(FILES, content=body(), headers={"content-type": FORM})) for _ in range(2)]
    # Without a content length, each may become as large as a file may be.
    assert await eventually(lambda: sum(http.app_state.files._receiving.values()) == 2000)
    refused = await http.upload(b"x" * 600)
    complete.set()
    assert [each.status_code for each in await asyncio.gather(*uploads)] == [200, 200]
    # The two were small after all: clients that try again after 429 succeed.
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "uploads_in_progress")
    assert int(refused.headers["retry-after"]) > 0
    assert (await http.upload(b"x" * 600)).status_code == 200


async def test_file_that_takes_all_of_the_quota_fits(http: BatchClient) -> None:
    """Its form is longer than it."""
    for size in (1000, 1000, 500):
        assert (await http.upload(b"x" * size)).status_code == 200
    refused = await http.upload(b"x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "storage_quota_exceeded")


async def test_upload_that_is_declared_too_large_is_refused_at_once(http: BatchClient) -> None:
    body = PART % (b"file", b'; filename="a"', b"x" * (1000 + MAX_FORM_BYTES)) + PURPOSE + END
    refused = await http.post(FILES, content=body, headers={"content-type": FORM})
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        413,
        "The file is larger than 1000 bytes, the limit of this server.",
    )


async def test_upload_that_is_cancelled_while_its_row_is_written_keeps_its_bytes(
    http: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written = http.app_state.store, asyncio.Event()
    write = store.write

    async def commit(query: Any) -> Any:
        result = await write(query)
        if result is True:  # the row is inserted
            written.set()
            await asyncio.Event().wait()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(store, "write", commit)
        upload = asyncio.create_task(http.upload(b"x"))
        await asyncio.wait_for(written.wait(), 60)
        upload.cancel()
        await asyncio.gather(upload, return_exceptions=True)
    (file,) = (await http.get(FILES)).json()["data"]
    assert (await http.get(f"{FILES}/{file['id']}/content")).content == b"x"


async def test_full_disk_is_a_temporary_error_and_leaves_nothing(
    http: BatchClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage_module.os, "write", fail)
        refused = await http.upload(b"x")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert "the disk of the server is full" in refused.json()["error"]["message"]
    assert on_disk(tmp_path) == []
    assert (await http.get(FILES)).json()["data"] == []
    assert (await http.upload(b"x")).status_code == 200


async def test_input_of_an_unfinished_batch_cannot_be_deleted(tmp_path: Path) -> None:
    async with batch_client(tmp_path, batch_concurrency=1) as http:
        http.app_state.batches._closed = True  # nothing runs
        batch = await http.create_batch([chat_line("a")])
        refused = await http.delete(f"{FILES}/{batch['input_file_id']}")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "file_in_use")
        await http.post(f"/v1/batches/{batch['id']}/cancel")
        http.app_state.batches._closed = False
        await http.app_state.batches.scan()
        await http.finished(batch["id"])
        assert (await http.delete(f"{FILES}/{batch['input_file_id']}")).status_code == 200


async def test_files_of_another_organization_are_unknown(tmp_path: Path) -> None:
    async with batch_client(tmp_path, api_key=("one", "two")) as http:
        id = (await http.upload(b"x")).json()["id"]
        other = {"authorization": "Bearer two"}
        for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
            assert (await http.request(method, f"{FILES}/{id}{path}", headers=other)).status_code == 404
        assert (await http.get(FILES, headers=other)).json()["data"] == []
