"""A store, a folder of files and a fake endpoint for tests of batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

from syringa.config import Prices
from syringa.service.auth.keys import ANONYMOUS, Caller
from syringa.service.batches.run import BatchRun, BatchServices, LineRequest, LineResponse
from syringa.service.files.manager import FileManager
from syringa.service.files.storage import FileStorage
from syringa.service.limits.memory_budget import MemoryBudget
from syringa.service.usage.accounting import RequestAccounting, usage_record
from syringa.store import Store, StoredBatch, UsageRecord
from tests.store.helpers import read, write

ENDPOINT = "/v1/chat/completions"


def line(custom_id: str, **changes: Any) -> str:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"model": "m"}} | changes)


def lines(count: int) -> list[str]:
    return [line(f"r{number}") for number in range(1, count + 1)]


class FakeEndpoint:
    """Answers lines at once with what `answer` returns, by default 200, and counts how often each was run."""

    def __init__(self) -> None:
        self.runs: dict[str, int] = {}
        self.answer: Callable[[LineRequest], tuple[int, float | None]] = lambda request: (200, None)
        self.suspect = False  # whether lines that fail may be the reason
        self.before: Callable[[LineRequest], Awaitable[None]] | None = None

    async def __call__(self, request: LineRequest) -> LineResponse:
        self.runs[request.request_id] = self.runs.get(request.request_id, 0) + 1
        if self.before is not None:
            await self.before(request)
        await asyncio.sleep(0)
        status, retry_after = self.answer(request)
        accounting = RequestAccounting([], request.caller, "/v1/batches", request.request_id)
        accounting.model, accounting.stats.prompt_tokens, accounting.stats.completion_tokens = "m", 4, 2
        accounting.close()
        return LineResponse(status, b'{"status":%d}' % status, accounting, retry_after, self.suspect)


class BatchHarness:
    def __init__(self, store: Store, folder: Path, **changes: Any) -> None:
        self.store, self.endpoint = store, FakeEndpoint()
        self.files = FileManager(store, FileStorage(folder), quota=0, days=30)
        self.callers: dict[str, Caller | None] = {"": ANONYMOUS}
        self.slept: list[float] = []
        self._number = 0
        self._changes = changes

    def services(self, owner: str = "one", **changes: Any) -> BatchServices:
        given: dict[str, Any] = {
            "store": self.store,
            "files": self.files,
            "execute": self.endpoint,
            "find_caller": self.callers.__getitem__,
            "usage_of": self._usage,
            "slots": MemoryBudget(8),
            "memory": MemoryBudget(1 << 20),
            "owner": owner,
            "max_line": 1000,
            "max_lines": 100,
            "queue_lines": 0,
            "days": 0,
            "sleep": self._sleep,
        }
        return BatchServices(**(given | self._changes | changes))

    async def upload(self, content: Iterable[str] | bytes) -> str:
        writer = self.files.new_writer()
        await writer.write(content if isinstance(content, bytes) else "\n".join(content).encode())
        return (await self.files.add(writer, "", "input.jsonl", "batch")).id

    async def create(self, content: Iterable[str] | bytes, **changes: Any) -> StoredBatch:
        self._number += 1
        given: dict[str, Any] = {
            "id": f"batch_{self._number}",
            "created_at": 0,
            "deadline": 1 << 40,
            "endpoint": ENDPOINT,
            "completion_window": "24h",
            "input_file": await self.upload(content),
        }
        batch = StoredBatch(**(given | changes))
        await write(self.store).batches.create(batch)
        return batch

    async def run(self, batch: StoredBatch, owner: str = "one", **changes: Any) -> StoredBatch:
        """Run a batch, from the status that is stored, and return it as it is stored then."""
        await write(self.store).batches.take(batch.id, owner, 1000.0, exited="one")
        current = await read(self.store).batches.get(batch.organization, batch.id)
        await BatchRun(current, self.services(owner, **changes)).run()
        found: StoredBatch = await read(self.store).batches.get(batch.organization, batch.id)
        return found

    async def read_file(self, id: str | None) -> list[dict[str, Any]]:
        if id is None:
            return []
        with await self.files.open(id) as file:
            return [json.loads(each) for each in file]

    async def usage(self) -> list[UsageRecord]:
        found: list[UsageRecord] = await read(self.store).usage.records(limit=10_000)
        return found

    async def close(self) -> None:
        await self.files.close()

    def _usage(self, accounting: RequestAccounting, id: str) -> UsageRecord:
        record = usage_record(accounting, Prices())
        return UsageRecord(**{name: getattr(record, name) for name in record.__struct_fields__} | {"id": id})

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)
