"""Grammars are compiled under limits, in turn for each tenant, before a worker sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from syringa.engine.client.probe_client import ProbeClient
from syringa.engine.structured_output import probe as probe_module
from syringa.errors import EngineOverloaded, InvalidRequest
from syringa.types import Grammar
from tests.client import eventually


class Probe:
    """A probe process and a client of it."""

    def __init__(self, folder: Path, cpu_seconds: float, memory_bytes: int) -> None:
        self.socket, self.log = str(folder / "probe.sock"), folder / "log"
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._limits = cpu_seconds, memory_bytes
        self.client = ProbeClient(self.socket, self.start)

    def start(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.starts += 1
            Path(self.socket).unlink(missing_ok=True)
            module = "tests.engine.structured_output.stub_probe"
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, self.socket, *map(str, self._limits), str(self.log)],
                stdin=subprocess.PIPE,
            )

    async def check(self, text: str, tenant: str = "", key: bytes = b"", *, background: bool = False) -> int:
        checking = self.client.check(Grammar("lark", text), tenant, key, background=background)
        return await asyncio.wait_for(checking, 60)

    @property
    def compiled(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@contextlib.asynccontextmanager
async def probe(folder: Path, cpu_seconds: float = 60.0, memory_bytes: int = 64 << 20) -> AsyncIterator[Probe]:
    found = Probe(folder, cpu_seconds, memory_bytes)
    try:
        yield found
    finally:
        found.client.close()
        if found.process is not None:
            found.process.kill()
            found.process.communicate()


async def test_probe_reports_memory_and_errors(tmp_path: Path) -> None:
    async with probe(tmp_path) as found:
        assert await found.check("ok") < 1 << 20
        assert 15 << 20 <= await found.check(f"allocate {16 << 20}") < 20 << 20
        with pytest.raises(InvalidRequest, match="the reason") as caught:
            await found.check("invalid the reason")
        assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize("text", [f"allocate {100 << 20}", "crash", "spin"])
async def test_probe_refuses_grammar_that_exceeds_a_limit(tmp_path: Path, text: str) -> None:
    async with probe(tmp_path, cpu_seconds=1.0) as found:
        with pytest.raises(InvalidRequest, match="more than 1 s of CPU time or 64 MB") as caught:
            await found.check(text)
        assert caught.value.code == "invalid_grammar"
        assert await found.check("ok") > 0
        assert found.starts == 1


async def test_probe_remembers_verdicts(tmp_path: Path) -> None:
    async with probe(tmp_path) as found:
        for _ in range(2):
            assert await found.check("ok") > 0
            for text in ("crash", "invalid because"):
                with pytest.raises(InvalidRequest):
                    await found.check(text)
        assert found.compiled == ["ok", "crash", "invalid because"]


async def test_probe_stops_hostile_schema_and_accepts_ordinary_ones(tmp_path: Path) -> None:
    """llguidance itself needs minutes and gigabytes for the hostile one."""
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    async with probe(tmp_path, cpu_seconds=1.0) as found:
        ordinary = Grammar("json_schema", json.dumps(person))
        assert 0 < await found.client.check(ordinary, "", b"") < 8 << 20
        hostile = Grammar("json_schema", '{"type":"integer","multipleOf":9999991}')
        with pytest.raises(InvalidRequest, match="too complex"):
            await asyncio.wait_for(found.client.check(hostile, "", b""), 60)


async def test_probe_serves_other_tenants_while_one_holds_its_process(tmp_path: Path) -> None:
    release = tmp_path / "release"
    async with probe(tmp_path) as found:
        hostile = [asyncio.create_task(found.check(f"wait {release}", "a", bytes([n]))) for n in range(5)]
        await eventually(lambda: found.compiled)
        assert await found.check("first", "b") > 0
        assert await found.check("second", "c") > 0
        assert found.compiled == [f"wait {release}", "first", "second"]
        assert not any(task.done() for task in hostile)
        release.touch()
        assert all(await asyncio.gather(*hostile))


async def test_probe_keeps_verdicts_of_cache_keys_apart(tmp_path: Path) -> None:
    async with probe(tmp_path) as found:
        for key in (b"a", b"b", b"a", b"b"):
            await found.check("ok", key=key)
        assert found.compiled == ["ok", "ok"]


async def test_probe_refuses_more_than_its_queue_of_one_tenant(tmp_path: Path) -> None:
    release = tmp_path / "release"
    async with probe(tmp_path) as found:
        count = probe_module.MAX_QUEUED + 3
        checks = [asyncio.create_task(found.check(f"wait {release}", "a", n.to_bytes(2))) for n in range(count)]
        await eventually(lambda: sum(check.done() for check in checks) == 2)
        assert await found.check("ok", "b") > 0
        release.touch()
        results = await asyncio.gather(*checks, return_exceptions=True)
        assert sum(isinstance(result, EngineOverloaded) for result in results) == 2


async def test_probe_stops_check_that_nobody_waits_for(tmp_path: Path) -> None:
    never = tmp_path / "never"
    async with probe(tmp_path) as found:
        check = asyncio.create_task(found.check(f"wait {never}", "a"))
        await eventually(lambda: found.compiled)
        check.cancel()
        await asyncio.gather(check, return_exceptions=True)
        assert await found.check("ok", "a") > 0  # the tenant's process is free again
        never.touch()
        assert await found.check(f"wait {never}", "a") > 0  # no verdict was remembered


async def test_probe_client_starts_probe_again_after_its_death(tmp_path: Path) -> None:
    never = tmp_path / "never"
    async with probe(tmp_path) as found:
        check = asyncio.create_task(found.check(f"wait {never}"))
        await eventually(lambda: found.compiled)
        assert found.process is not None
        found.process.kill()
        found.process.communicate()
        never.touch()
        assert await check > 0
        assert found.starts == 2


async def test_probe_never_refuses_checks_in_the_background_and_serves_them_last(tmp_path: Path) -> None:
    release = tmp_path / "release"
    async with probe(tmp_path) as found:
        batch = [
            asyncio.create_task(found.check(f"wait {release}", "a", n.to_bytes(2), background=True))
            for n in range(probe_module.MAX_QUEUED + 3)
        ]
        await eventually(lambda: found.compiled)
        own = asyncio.create_task(found.check("own", "a"))
        # Messages arrive in their order: the probe has the others when it answers, on the slot that batches leave.
        assert await found.check("other", "b") > 0
        assert not any(task.done() for task in (*batch, own))
        release.touch()
        assert await own > 0
        assert all(await asyncio.gather(*batch))
        assert found.compiled[:3] == [f"wait {release}", "other", "own"]


async def test_probe_has_one_process_for_the_background_of_all_tenants(tmp_path: Path) -> None:
    release = tmp_path / "release"
    async with probe(tmp_path) as found:
        batches = [asyncio.create_task(found.check(f"wait {release}", each, background=True)) for each in "ab"]
        await eventually(lambda: found.compiled)
        assert await found.check("ok", "c") > 0
        assert found.compiled == [f"wait {release}", "ok"]
        release.touch()
        assert all(await asyncio.gather(*batches))


@pytest.mark.parametrize("background", [False, True])
async def test_probe_checks_a_grammar_once_for_all_that_wait_for_it(tmp_path: Path, background: bool) -> None:
    release = tmp_path / "release"
    async with probe(tmp_path) as found:
        first = asyncio.create_task(found.check("wait " + str(release), "a", background=background))
        await eventually(lambda: found.compiled)
        checks = [
            asyncio.create_task(found.check(text, "a", background=background))
            for _ in range(probe_module.MAX_QUEUED + 3)
            for text in (f"wait {release}", "ok")
        ]
        assert await found.check("other", "b") > 0
        checks[0].cancel()  # the others go on waiting
        checks[1].cancel()
        release.touch()
        assert await first > 0
        assert all(await asyncio.gather(*checks[2:]))
        assert found.compiled == [f"wait {release}", "other", "ok"]


async def test_probe_finds_the_verdict_of_a_check_in_the_other_class(tmp_path: Path) -> None:
    release = tmp_path / "release"
    async with probe(tmp_path) as found:
        checks = [
            asyncio.create_task(found.check(f"wait {release}", "a", background=background))
            for background in (True, False)
        ]
        assert await found.check("other", "b") > 0
        release.touch()
        assert all(await asyncio.gather(*checks))
        assert sorted(found.compiled) == ["other", f"wait {release}"]


async def test_probe_lets_a_check_in_the_background_wait_when_the_machine_is_too_busy(tmp_path: Path) -> None:
    """It was killed for its time on the clock, and not by its limits."""
    never = tmp_path / "never"
    async with probe(tmp_path, cpu_seconds=0.1) as found:
        with pytest.raises(EngineOverloaded):
            await found.check(f"wait {never}", background=True)
        with pytest.raises(InvalidRequest):
            await found.check(f"wait {never}")
