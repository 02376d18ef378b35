"""The validation of a batch's input file: whether it can be run at all, and how many lines it has."""

from __future__ import annotations

import hashlib
from typing import BinaryIO, NamedTuple

import msgspec

from syringa.service.batches.lines import EMPTY_FILE, BatchLine, LineProblem, parse_line, read_lines
from syringa.store import StoredBatch

QUEUE_FULL = LineProblem(
    "request_limit_exceeded",
    "Enqueued request limit reached: the unfinished batches of this organization have too many requests to add those of"
    " this file. Create the batch again when some are finished.",
)
_MAX_PROBLEMS = 20  # of a file without a valid line


class ValidatedFile(NamedTuple):
    total: int  # lines that are not blank
    model: str | None  # that of all lines; None: they differ
    problems: list[LineProblem]  # why the whole file cannot be run; empty if it can


class CustomIds:
    """The custom ids of the lines so far, of which each may occur once. Keeps 8 bytes of each."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def is_new(self, custom_id: str) -> bool:
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True


async def validate(
    batch: StoredBatch, file: BinaryIO, *, max_line: int, max_lines: int, free_lines: int | None
) -> ValidatedFile:
    """Read the whole file. A bad line becomes an error line when the batch runs; a file without a good one fails.

    `free_lines`: how many lines the organization may still queue; None: any number.
    """
    total = valid = 0
    models: set[str | None] = set()
    problems: list[LineProblem] = []
    async for line in read_lines(file, max_line):
        total += 1
        if total > max_lines:
            message = f"The input file has more than {max_lines} requests, the limit of a batch."
            return ValidatedFile(0, None, [LineProblem("too_many_requests", message)])
        if free_lines is not None and total > free_lines:
            return ValidatedFile(0, None, [QUEUE_FULL])
        parsed = parse_line(line, batch.endpoint, max_line)
        if isinstance(parsed, BatchLine):
            valid += 1
            if len(models) < 2:
                models.add(parsed.model)
        elif len(problems) < _MAX_PROBLEMS:
            problems.append(parsed)
    if not total:
        message = "The input file is empty. Please ensure that the file contains at least one batch request."
        return ValidatedFile(0, None, [LineProblem(EMPTY_FILE, message)])
    model = next(iter(models)) if len(models) == 1 else None
    return ValidatedFile(total, model, [] if valid else problems)


def encode_problems(problems: list[LineProblem]) -> str:
    return msgspec.json.encode(problems).decode()
