"""A batch of the largest size, on the fake engine."""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from tests.client import until
from tests.fake_engine import FakeEngine
from tests.http.batch_client import BATCHES, FILES, batch_client, chat_line
from tests.store.helpers import read

LINES = 50_000
MAX_GROWTH = 24 << 20  # bytes: less than the input or the output has


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
async def test_batch_of_50_000_lines_runs_each_once_in_flat_memory(tmp_path: Path) -> None:
    engine = FakeEngine("hello " * 20, at_once=200)
    engine.requests = deque(maxlen=1)  # type: ignore[assignment]
    padding = "x" * 1000
    content = tmp_path / "input.jsonl"
    with content.open("w") as file:
        file.writelines(chat_line(f"{number}", user=padding, max_tokens=200) + "\n" for number in range(LINES))
    async with batch_client(tmp_path, engine) as http:
        # A file object, so that the client does not hold all of it either.
        with content.open("rb") as file:
            form: dict[str, Any] = {"files": {"file": ("input.jsonl", file)}, "data": {"purpose": "batch"}}
            id = (await http.post(FILES, **form)).json()["id"]
        body = {"input_file_id": id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await http.post(BATCHES, json=body)).json()
        samples: list[int] = []

        async def is_done() -> bool:
            found = (await http.get(f"{BATCHES}/{batch['id']}")).json()
            if found["request_counts"]["completed"] >= LINES // 20:  # it has warmed up
                samples.append(resident_bytes())
            return bool(found["status"] == "completed")

        await until(is_done, 1800)
        done = (await http.get(f"{BATCHES}/{batch['id']}")).json()
        assert done["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
        records = await http.app_state.store.read(lambda session: session.usage.sums())
        assert records[0].requests == LINES
        # Each line is in the output once, in the order of the input.
        number = 0
        async with http.stream("GET", f"{FILES}/{done['output_file_id']}/content") as answer:
            async for line in answer.aiter_lines():
                assert json.loads(line)["custom_id"] == str(number)
                number += 1
        assert number == LINES
        assert done["error_file_id"] is None
        file_row = await read(http.app_state.store).files.get("", done["output_file_id"])
        assert min(file_row.bytes, content.stat().st_size) > MAX_GROWTH
    growth = max(samples) - samples[0]
    assert growth < MAX_GROWTH, f"the process has grown by {growth} bytes"
