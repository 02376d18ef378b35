"""The output and error files of a batch: every line of the input is in exactly one of them, in the same order."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from syringa.errors import NotFound, StoreOutcomeUnknown, StoreUnavailable
from syringa.service.batches.lines import InputLine, custom_id_of, error_line, line_id, read_lines
from syringa.service.files.storage import FileWriter
from syringa.store import BatchStatus, StoredBatch, StoredFile

if TYPE_CHECKING:
    from syringa.service.batches.run import BatchServices
    from syringa.store.session import Session

logger = logging.getLogger("syringa.service")

_NOT_RUN: dict[BatchStatus, tuple[str, str]] = {
    "expired": (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    "cancelled": ("batch_cancelled", "This request was not executed, because the batch was cancelled."),
}


class OutputFiles:
    """The files of a finished batch, by the column of their ids."""

    def __init__(self) -> None:
        self.files: dict[str, StoredFile] = {}
        self.missing = 0  # lines that were not run


@contextlib.asynccontextmanager
async def write_output_files(
    batch: StoredBatch, services: BatchServices, status: BatchStatus
) -> AsyncIterator[OutputFiles]:
    """Write the files of a batch that ends with a status, for a block that makes them known to the store.

    They are removed again if the block raises an error, unless the store may know them all the same: when its
    transaction has no answer, or the wait for it is cancelled. If it does not, they are garbage, and are removed later.
    """
    files, found = services.files, OutputFiles()
    output, errors = files.new_writer(), files.new_writer()
    try:
        await _write(batch, services, status, output, errors, found)
        for column, writer in (("output_file", output), ("error_file", errors)):
            if not writer.bytes:
                continue
            await writer.finish()
            name = f"{batch.id}_{column.removesuffix('_file')}.jsonl"
            found.files[column] = files.describe(
                writer, batch.organization, name, "batch_output", seconds=batch.output_seconds
            )
    except BaseException:
        await _discard(output, errors)
        raise
    try:
        yield found
    except StoreOutcomeUnknown:
        raise
    except Exception:
        await _discard(output, errors)
        raise


async def _discard(*writers: FileWriter) -> None:
    for writer in writers:
        await writer.discard()


async def _write(
    batch: StoredBatch,
    services: BatchServices,
    status: BatchStatus,
    output: FileWriter,
    errors: FileWriter,
    found: OutputFiles,
) -> None:
    some_missing = status in _NOT_RUN and batch.completed + batch.failed < batch.total
    async with contextlib.aclosing(_input_lines(batch, services)) as lines:

        async def write_missing(before: int | None) -> None:
            """Write the lines of the input that have no result and come before a line."""
            code, message = _NOT_RUN[status]
            async for line in lines:
                if line.number == before:
                    return
                found.missing += 1
                text = error_line(line_id(batch.id, line.number), custom_id_of(line), code, message)
                await errors.write(text.encode() + b"\n")

        async for row in _results(batch, services):
            if some_missing:
                await write_missing(row.line)
            await (errors if row.failed else output).write(row.body.encode() + b"\n")
        if some_missing:
            await write_missing(None)


async def _input_lines(batch: StoredBatch, services: BatchServices) -> AsyncGenerator[InputLine, None]:
    """Yield the lines of the input, none if it is missing. After the deadline, what cannot be read is missing, too."""
    try:
        with await services.files.open(batch.input_file) as file:
            async for line in read_lines(file, services.max_line):
                yield line
    except NotFound:
        return
    except StoreUnavailable as error:
        if services.clock() < batch.deadline:
            raise
        logger.warning("batches: ended without all of its input: batch=%s error=%s", batch.id, error.message)


async def _results(batch: StoredBatch, services: BatchServices) -> AsyncIterator[Any]:
    after = 0
    while True:
        query = functools.partial(_read_page, batch, after)
        if not (page := await services.store.read(query)):
            return
        for row in page:
            yield row
        after = page[-1].line


def _read_page(batch: StoredBatch, after: int, session: Session) -> Sequence[Any]:
    return session.batches.results(batch.organization, batch.id, after=after)
