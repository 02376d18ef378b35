"""Batches beside requests of the same organization: what they fill is not in the way of these, and no line is lost."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from syringa.engine.scheduling.limits import QueueFull, SchedulerLimits
from syringa.engine.structured_output.probe import MAX_QUEUED
from syringa.errors import EngineOverloaded
from syringa.types import EngineRequest, Grammar, in_background
from tests.chat_models import tool_model
from tests.client import eventually
from tests.engine.client.engine_harness import EngineHarness, answers, replica, state, workers
from tests.engine.scheduling.model_free_engine import ModelFreeEngine, sequence
from tests.engine.structured_output.test_probe import Probe, probe
from tests.fake_engine import FakeEngine
from tests.http.batch_client import CHAT, batch_client, chat_line

MESSAGES = [{"role": "user", "content": "x"}]
COMPLETIONS = "/v1/completions"


class NumberedChecks:
    """Has the probe check a grammar for each mark in the schemas of requests; `gate` holds it until `release`."""

    def __init__(self, probe: Probe, release: Path) -> None:
        self.asked: list[bool] = []  # whether in the background
        self.gate = f"wait {release}"
        self._probe = probe

    async def __call__(self, grammar: Grammar, tenant: str, salt: str | None) -> int:
        found = re.search(r"mark_(\w+)", grammar.value)
        assert found is not None
        text = self.gate if found[1] == "gate" else found[1]
        self.asked.append(in_background.get())
        return await self._probe.check(text, tenant, background=in_background.get())


def with_schema(mark: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"mark_{mark}": {"type": "string"}}}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}


def with_tool(mark: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"mark_{mark}": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    return {"tools": [tool], "tool_choice": "required"}


@pytest.mark.parametrize("fields", [with_schema, with_tool])
async def test_grammar_of_a_request_is_checked_before_those_of_a_batch(tmp_path: Path, fields: Any) -> None:
    release, marks = tmp_path / "release", [f"line{number}" for number in range(MAX_QUEUED + 10)]
    lines = [chat_line(mark, **fields(mark)) for mark in ["gate", *marks]]
    async with probe(tmp_path) as found:
        checks = NumberedChecks(found, release)
        async with batch_client(tmp_path, model=tool_model(check_grammar=checks)) as http:
            batch = await http.create_batch(lines)
            assert await eventually(lambda: len(checks.asked) == len(lines) and checks.gate in found.compiled)
            asking = asyncio.create_task(http.post(CHAT, json={"messages": MESSAGES} | fields("interactive")))
            assert await eventually(lambda: len(checks.asked) == len(lines) + 1)
            await found.check("other", "b")  # messages arrive in their order: the probe has all of them
            release.touch()
            answer = await asyncio.wait_for(asking, 60)
            assert answer.status_code == 200, answer.text
            done = await http.finished(batch["id"])
    assert done["request_counts"] == {"total": len(lines), "completed": len(lines), "failed": 0}
    at = found.compiled.index(checks.gate)
    assert found.compiled[at + 1 : at + 3] == ["other", "interactive"]
    # Each of them once: none was refused.
    assert sorted(found.compiled) == sorted([*marks, checks.gate, "other", "interactive"])
    assert checks.asked == [True] * len(lines) + [False]


class QueueingEngine(FakeEngine):
    """A fake engine behind the queue of a real one."""

    def __init__(self, limits: SchedulerLimits) -> None:
        super().__init__("hello", at_once=8)
        self.core = ModelFreeEngine(1000, limits)
        self.open = asyncio.Event()  # whether steps are run

    async def submit(self, request: EngineRequest, on_delta: Any) -> None:
        queued = sequence(list(request.prompt), tenant=request.tenant, background=request.background, max_tokens=1)
        try:
            self.core.submit(queued)
        except QueueFull:
            raise EngineOverloaded("The queue is full.") from None
        await self.open.wait()
        while queued not in self.core.finished:
            self.core.step()
            await asyncio.sleep(0)
        await super().submit(request, on_delta)


async def test_lines_with_many_prompts_never_fill_the_queue(tmp_path: Path) -> None:
    engine = QueueingEngine(SchedulerLimits(step_tokens=64, max_running=4, max_queue=8))
    lines = [
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": COMPLETIONS,
                "body": {"prompt": [f"{number} {each}" for each in range(6)], "max_tokens": 8},
            }
        )
        for number in range(20)
    ]
    async with batch_client(tmp_path, engine) as http:
        batch = await http.create_batch(lines, COMPLETIONS)
        assert await eventually(lambda: len(engine.core.live) == 6 * len(lines))
        asking = asyncio.create_task(http.post(COMPLETIONS, json={"prompt": "now", "max_tokens": 8}))
        assert await eventually(lambda: len(engine.core.live) == 6 * len(lines) + 1)
        engine.open.set()
        assert (await asyncio.wait_for(asking, 60)).status_code == 200
        done = await http.finished(batch["id"])
        output = await http.lines(done["output_file_id"])
    assert done["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert all(len(each["response"]["body"]["choices"]) == 6 for each in output)
    assert not engine.core.finished[0].request.background
    assert len(engine.requests) == 6 * len(lines) + 1  # no prompt was computed twice


async def test_line_waits_for_a_model_of_a_cluster_that_has_no_replica(tmp_path: Path) -> None:
    """Its pool is closed, for example: that ends a request by `queue_timeout`, and no line."""
    harness = EngineHarness(queue_timeout=0.01)
    harness.engine.update(state("loading"))
    async with workers(1) as (worker,), batch_client(tmp_path, harness.engine) as http:
        batch = await http.create_batch([chat_line("a")])
        assert await eventually(lambda: harness.sent)  # the line asks for a replica
        refused = await http.post(CHAT, json={"messages": MESSAGES})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
        ((run, _),) = http.app_state.batches._runs.values()
        assert run._refusals == 0  # it waits inside of the engine, in its turn
        worker.on_request = answers(*b"hello")
        harness.engine.update(state("loaded", replica(worker)))
        done = await http.finished(batch["id"])
        assert done["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert len(worker.requests) == 1
        assert worker.requests[0].background
    await harness.engine.close()
