"""Accounting and limits on a real server: every request is recorded, also when clients or processes disappear."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import os
import random
import re
import signal
import sqlite3
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from syringa.store import UsageRecord
from tests.e2e.conftest import MODEL
from tests.e2e.scripts import run_python
from tests.e2e.sdk import OPENAI_PYTHON
from tests.e2e.server import alive, wait_for
from tests.e2e.service import API, WORKER, Key, Service, command, create_key, start, status, usage_records
from tests.e2e.service_load import LATE, Load, Mix, Plan, Seen, differences

pytestmark = pytest.mark.model

PER_MINUTE, AT_ONCE, TOKENS = 30, 2, 600
GROWTH = 150 << 20
FILES = 16  # descriptors that a process opens under load and keeps: connections to the database
TRACE = r'  File "|usage: records are lost|is not counted'  # must not appear in a log
SLACK = 2.0  # seconds between an event and its time stamp
# A cache that a part of the load fills, so that its first use does not count as growth.
SETTINGS = ("--kv-cache-tokens", "4096", "--served-model-name", MODEL)


class Keys(NamedTuple):
    """API keys by purpose.

    `free` and `also` belong to an organization without limits, `often` and `oftener` to one with 30 requests a minute.
    `pair` has a concurrency limit and `words` a token limit. `revoked` and `expired` are invalid.
    """

    free: Key
    also: Key
    often: Key
    oftener: Key
    pair: Key
    words: Key
    revoked: Key
    expired: Key


def make_keys(database: str) -> Keys:
    command(database, "organizations", "set", "free", "--requests-per-minute", "0")
    wanted = [
        ("free",),
        ("free",),
        ("often",),
        ("often",),
        ("free", "--concurrent", str(AT_ONCE)),
        ("free", "--tokens-per-minute", str(TOKENS)),
        ("free",),
        ("free", "--expires", "1s"),
    ]
    with ThreadPoolExecutor(2) as pool:
        keys = Keys(*pool.map(lambda options: create_key(database, *options), wanted))
    command(database, "organizations", "set", "often", "--requests-per-minute", str(PER_MINUTE))
    command(database, "keys", "revoke", keys.revoked.id)
    return keys


@pytest.mark.slow
def test_every_request_has_a_usage_record(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2,000 requests of 200 clients; fewer on PostgreSQL, where only the database differs."""
    clients, each = (50, 12) if database.startswith("postgresql:") else (200, 10)
    keys = make_keys(database)
    with start(database, tmp_path, *SETTINGS) as service:
        warm = Load(service.url)
        asyncio.run(warm.client(Mix(1).plain(keys.free) for _ in range(8)))
        files = service.files()
        early: dict[int, int] = {}

        def watch(count: int) -> None:
            if count == clients * each // 4:
                early.update(service.memory())

        load = Load(service.url, watch)
        asyncio.run(many(load, keys, clients, each))
        service.wait_idle()
        wait_for(lambda: all(count <= files[pid] + FILES for pid, count in service.files().items()))
        late, files_late = service.memory(), service.files()
        assert service.server.stop() == 0
    assert not re.search(TRACE, service.log())
    assert len(load.seen) == clients * each
    assert not [seen for seen in load.seen if seen.fate == "broken"]
    assert early.keys() == late.keys()
    assert all(late[pid] < early[pid] + GROWTH for pid in late)
    strangers = [seen for seen in load.seen if seen.plan.key not in keys[:6]]
    assert strangers
    assert {seen.status for seen in strangers} == {401}

    rows = usage_records(database)
    known = [seen for seen in warm.seen + load.seen if seen.plan.key in keys[:6]]
    assert differences(known, rows) == []
    assert sum(row.requests for row in rows) == len(known)
    check_limits(keys, rows, known)
    check_tables(database, rows)
    with capsys.disabled():
        report(load.seen, rows, early, late, files, files_late)


async def many(load: Load, keys: Keys, clients: int, each: int) -> None:
    mix, pauses = Mix(2), random.Random(3)
    useless = [Key("", "sk-syr-" + "x" * 43), keys.revoked, keys.expired, Key("", "short")]
    special = [[keys.often, keys.oftener], [keys.pair], [keys.words], useless]
    running = []
    for number in range(clients):
        plans: list[Plan]
        if (place := number % 10 - 6) < 0:
            plans = [mix.any([keys.free, keys.also]) for _ in range(each)]
        else:
            plans = [mix.plain(key) for key in itertools.islice(itertools.cycle(special[place]), each)]
        running.append(load.client(plans, lambda: pauses.uniform(0.2, 1.5)))
    await asyncio.gather(*running)


def check_limits(keys: Keys, rows: Sequence[UsageRecord], seen: Sequence[Seen]) -> None:
    """Check that each limit was reached, and that none was exceeded."""
    for limited in ([keys.often, keys.oftener], [keys.pair], [keys.words]):
        refused = [each for each in seen if each.plan.key in limited and each.status == 429]
        assert refused
        assert all(1 <= each.retry_after <= 60 for each in refused)
    admitted = sorted((row for row in rows if row.status != 429), key=lambda row: row.at)

    often = [row.at for row in admitted if row.key in (keys.often.id, keys.oftener.id)]
    assert len(often) >= PER_MINUTE
    assert all(later - first > 60 - SLACK for first, later in zip(often, often[PER_MINUTE:], strict=False))

    pair = [row for row in admitted if row.key == keys.pair.id]
    for row in pair:
        at_once = [each for each in pair if each.at <= row.at < each.at + each.total_seconds - SLACK]
        assert len(at_once) <= AT_ONCE

    words = [row for row in admitted if row.key == keys.words.id]
    for row in words:
        ended = [each for each in words if row.at - 60 + SLACK < each.at + each.total_seconds < row.at - SLACK]
        assert sum(each.input_tokens + each.output_tokens for each in ended) < TOKENS


def check_tables(database: str, rows: Sequence[UsageRecord]) -> None:
    """Check the totals of `syringa usage`."""
    printed = command(database, "usage", "--by", "key", "--since", "all", "--csv").stdout
    table = {line["key"]: line for line in csv.DictReader(io.StringIO(printed))}
    assert table.keys() == {row.key for row in rows}
    for key, line in table.items():
        own = [row for row in rows if row.key == key]
        assert int(line["requests"]) == sum(row.requests for row in own)
        assert int(line["output_tokens"]) == sum(row.output_tokens for row in own)


def report(seen: Sequence[Seen], rows: Sequence[UsageRecord], *figures: dict[int, int]) -> None:
    took = max(each.ended for each in seen) - min(each.began for each in seen)
    fates = {fate: sum(each.fate == fate for each in seen) for fate in ("ok", "left", "refused", "failed")}
    tokens = sum(row.output_tokens for row in rows)
    early, late, files, files_late = (list(each.values()) for each in figures)
    print(f"\n{len(seen)} requests in {took:.0f} s, {tokens} tokens: {fates}, {len(rows)} rows")
    print(f"MiB {[each >> 20 for each in early]}, then {[each >> 20 for each in late]}; files {files}, {files_late}")


@pytest.mark.slow
def test_killed_processes_under_load_lose_no_limits_or_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kill an API process, then the model worker. Only requests in flight fail."""
    database = str(tmp_path / "syringa.db")
    command(database, "organizations", "set", "free", "--requests-per-minute", "0")
    keys = [create_key(database, "free"), create_key(database, "free", "--concurrent", "4")]
    with start(database, tmp_path, *SETTINGS) as service:
        load = Load(service.url)
        kills = asyncio.run(killing(load, service, keys))
        service.wait_idle()
        asyncio.run(load.client([Mix(6).plain(keys[1])]))
        assert load.seen[-1].fate == "ok"  # the running requests of the killed process no longer count
        children = service.server.children()
        assert len(children) == 3
        assert service.server.stop() == 0
        assert not any(alive(pid) for pid in (*children, *kills.pids))
    assert not re.search(TRACE, service.log())
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert differences(load.seen, usage_records(database), kills=[kills.api], failures=[kills.worker]) == []
    for seen in load.seen:
        if seen.fate == "broken":
            assert seen.began < kills.api + LATE, seen
            assert seen.ended > kills.api, seen
            assert seen.ended < kills.api + 60, seen
        elif seen.fate == "failed" and "took longer" not in seen.message:
            assert seen.began < kills.worker + LATE, seen
            assert seen.ended > kills.worker, seen
            assert seen.message.startswith("The model worker ended while it was answering"), seen
    with capsys.disabled():
        fates = {fate: sum(each.fate == fate for each in load.seen) for fate in ("ok", "broken", "failed")}
        print(f"\n{len(load.seen)} requests, {fates}; back after {kills.api_back:.1f} s and {kills.worker_back:.1f} s")


class Kills(NamedTuple):
    pids: list[int]
    api: float  # time of the kill
    worker: float
    api_back: float  # seconds until it was replaced
    worker_back: float


async def killing(load: Load, service: Service, keys: Sequence[Key]) -> Kills:
    mix, pauses = Mix(4), random.Random(5)
    running = True

    def plans(number: int) -> Iterator[Plan]:
        while running:
            yield mix.plain(keys[1]) if number % 10 == 0 else mix.any(keys[:1])

    def enough(count: int) -> asyncio.Task[None]:
        goal = len(load.seen) + count
        return asyncio.create_task(until(lambda: len(load.seen) >= goal))

    clients = [load.client(plans(number), lambda: pauses.uniform(0.05, 0.3)) for number in range(60)]
    tasks = [asyncio.create_task(client) for client in clients]
    try:
        await enough(200)
        api, *_ = service.server.children(API)
        killed = time.time()
        os.kill(api, signal.SIGKILL)
        await until(lambda: api not in (now := service.server.children(API)) and len(now) == 2)
        api_back = time.time() - killed
        await enough(150)
        (worker,) = service.server.children(WORKER)
        killed_worker = time.time()
        os.kill(worker, signal.SIGKILL)
        await until(lambda: any(each.fate == "ok" and each.began > killed_worker for each in load.seen[-50:]))
        worker_back = time.time() - killed_worker
        await enough(150)
    finally:
        running = False
    async with asyncio.timeout(300):
        await asyncio.gather(*tasks)
    return Kills([api, worker], killed, killed_worker, api_back, worker_back)


async def until(condition: object) -> None:
    assert callable(condition)
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110  processes can only be polled
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("service")
    database = str(folder / "syringa.db")
    create_key(database, "acme")
    with start(database, folder, *SETTINGS) as service:
        yield service


def test_revoked_key_is_refused_by_every_process(service: Service, capsys: pytest.CaptureFixture[str]) -> None:
    key = create_key(service.database, "leaver")
    service.wait_known(key)
    connections = service.connections()
    command(service.database, "keys", "revoke", key.id)
    revoked = time.monotonic()
    refused: dict[int, float] = {}
    while refused.keys() != connections.keys():
        for owner, connection in connections.items():
            if status(connection, key) == 401:
                refused.setdefault(owner, time.monotonic() - revoked)
        assert time.monotonic() < revoked + 120  # usually a second
    assert {status(connection, key) for connection in connections.values()} == {401}
    with capsys.disabled():
        print(f"\nrefused after {', '.join(f'{each:.2f}' for each in refused.values())} s")


def test_openai_package_retries_after_429(service: Service) -> None:
    key = create_key(service.database, "patient", "--concurrent", "1")
    service.wait_known(key)
    run_python(service.server, "openai_retry_client.py", OPENAI_PYTHON, key.text)
