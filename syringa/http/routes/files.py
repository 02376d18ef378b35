"""The Files API: upload, list, retrieve and delete files."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from syringa.api import files as wire
from syringa.config import Config
from syringa.errors import InvalidRequest, NotFound
from syringa.http import dependencies
from syringa.http.context import request_context
from syringa.http.uploads import MAX_FORM_BYTES, check_upload_size, read_upload
from syringa.service.app_state import AppState
from syringa.service.files.storage import CHUNK_BYTES
from syringa.store import StoredFile

if TYPE_CHECKING:
    from syringa.store.session import Session

MAX_PAGE_SIZE = 10_000


class FileRoutes:
    def __init__(self, config: Config, app_state: AppState) -> None:
        self._config, self._store, self._files = config, app_state.store, app_state.files

    async def upload(self, request: Request) -> Response:
        organization = dependencies.organization(request)
        length = request_context(request.scope).headers.get(b"content-length", b"")
        largest = self._config.file_max_bytes
        size = int(length) if length.isdigit() else None
        check_upload_size(size, largest)
        async with self._files.reserve(organization, size, largest, overhead=MAX_FORM_BYTES):
            writer = self._files.new_writer()
            try:
                form = await read_upload(request, writer, largest)
                fields = wire.read_upload_fields(form.fields)
                headers = dependencies.ignored_fields_header(self._config, fields.ignored)
            except BaseException:
                await writer.discard()
                raise
            file = await self._files.add(
                writer, organization, form.filename, wire.UPLOAD_PURPOSE, seconds=fields.expires_seconds
            )
        return dependencies.json(to_object(file), headers)

    async def list(self, request: Request) -> Response:
        organization, query = dependencies.organization(request), request.query_params
        purpose: Any = query.get("purpose")
        if purpose is not None and purpose not in wire.PURPOSES:
            raise InvalidRequest(f"purpose: expected {' or '.join(wire.PURPOSES)}, not {purpose!r}.", param="purpose")
        page = dependencies.read_page_query(query, default=MAX_PAGE_SIZE, largest=MAX_PAGE_SIZE)
        found, has_more = await self._store.read(
            lambda session: session.files.page(
                organization, purpose=purpose, after=page.after, limit=page.limit, order=page.order
            )
        )
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        data = [to_object(file) for file in found]
        return dependencies.json(wire.FileList(data=data, first_id=first, last_id=last, has_more=has_more))

    async def get(self, request: Request) -> Response:
        return dependencies.json(to_object(await self._find(request)))

    async def content(self, request: Request) -> Response:
        file = await self._find(request)
        return FileResponse(file, await self._files.open(file.id))

    async def delete(self, request: Request) -> Response:
        organization, id = dependencies.organization(request), request.path_params["file_id"]

        def delete(session: Session) -> bool:
            if session.files.get(organization, id, lock=True) is not None and session.files.is_used(organization, id):
                message = f"The file {id!r} is the input of a batch that is not finished: cancel it first."
                raise InvalidRequest(message, param="file_id", code="file_in_use")
            return session.files.delete(organization, id)

        if not await self._store.write(delete):
            raise file_not_found(id)
        await self._files.remove(id)
        return dependencies.json(wire.DeletedFile(id=id))

    async def _find(self, request: Request) -> StoredFile:
        organization, id = dependencies.organization(request), request.path_params["file_id"]
        found = await self._store.read(lambda session: session.files.get(organization, id))
        if found is None:
            raise file_not_found(id)
        return found


class FileResponse(Response):
    """The content of a file, read in a thread as the client reads it."""

    def __init__(self, file: StoredFile, opened: BinaryIO) -> None:
        super().__init__(media_type="application/octet-stream")
        self._opened = opened
        name = file.filename.encode("ascii", "replace").decode().replace("\\", "_").replace('"', "_")
        self.headers["content-disposition"] = f'attachment; filename="{name}"'
        self.headers["content-length"] = str(file.bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._opened:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            cycle = request_context(scope).cycle
            while scope["method"] != "HEAD" and (data := await asyncio.to_thread(self._opened.read, CHUNK_BYTES)):
                if cycle is not None and cycle.disconnected:
                    return
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def to_object(file: StoredFile) -> wire.FileObject:
    fields = msgspec.structs.asdict(file)
    del fields["organization"]
    return wire.FileObject(**fields)


def file_not_found(id: str, param: str | None = None) -> NotFound:
    return NotFound(f"There is no file {id!r}.", param=param, code="file_not_found")
