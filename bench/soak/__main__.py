"""Soak the server: `python -m bench.soak --minutes 15`. See docs/development/soak.md."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from bench.soak.clients import Client
from bench.soak.faults import Faults, wait_idle
from bench.soak.fuzz import Fuzzer
from bench.soak.fuzzing import FuzzRun
from bench.soak.report import Report, show, soak_report, write_json, write_page
from bench.soak.results import Results
from bench.soak.server import BLOCK_TOKENS, CACHE_TOKENS, SoakServer
from bench.soak.usage_check import compare, read_rows
from bench.soak.workload import OrganizationState, check_complete
from syringa.bench.processes import cores, cpu_name
from syringa.errors import StartupError

ORGANIZATIONS = ("soak-a", "soak-b", "soak-limited")
LIMITED_REQUESTS = 600  # per minute, of the last organization, so that it runs into its limit
QUICK_MINUTES = 2.0
QUICK_CLIENTS = 40
PROGRESS_SECONDS = 30.0
CALM_SECONDS = 10.0  # without faults, at the end


class Options(msgspec.Struct, frozen=True, kw_only=True):
    minutes: float
    clients: int
    pause: float
    seed: int
    database: str
    fuzz: int


async def soak(options: Options, folder: Path, console: Console) -> Report:
    server = SoakServer(folder, options.database)
    await server.create_admin_key()
    try:
        server.start()
        await server.wait_ready()
        return await (_fuzz(server, options) if options.fuzz else _soak(server, options, console))
    finally:
        server.stop()


async def _document(server: SoakServer) -> dict[str, object]:
    document: dict[str, object] = msgspec.json.decode((await server.ask("GET", "/openapi.json")).body)
    return document


async def _fuzz(server: SoakServer, options: Options) -> Report:
    key = await server.create_key(ORGANIZATIONS[0])
    fuzzer = Fuzzer(await _document(server), admin=True)
    return await FuzzRun(server, fuzzer, key.text, options.fuzz, options.seed).run(_about(options))


async def _soak(server: SoakServer, options: Options, console: Console) -> Report:
    results = Results()
    faults = Faults(server, results, probe_key=(await server.create_key("soak-probe")).text, seed=options.seed)
    clients = await _create_clients(server, results, options)
    before = server.memory()
    until = time.monotonic() + 60 * options.minutes
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run())
        progress = group.create_task(_show_progress(console, results, until))
        await faults.run(until - CALM_SECONDS)
        await asyncio.sleep(max(CALM_SECONDS, until - time.monotonic()))
        progress.cancel()
        for client in clients:
            client.stopping = True
    gauges = await wait_idle(server)
    leaked = round(gauges["kv_cache_usage_perc"] * CACHE_TOKENS / BLOCK_TOKENS) if gauges else None
    after = server.memory()
    server.stop()
    usage = compare(results.metered, results.unknown, await read_rows(server.database, ORGANIZATIONS))
    return soak_report(
        "sqlite" if server.is_sqlite else "postgresql",
        _about(options),
        results,
        usage,
        leaked_blocks=leaked,
        memory=(before, after),
        unexpected=server.unexpected_errors(),
    )


async def _create_clients(server: SoakServer, results: Results, options: Options) -> list[Client]:
    fuzzer = Fuzzer(await _document(server))
    limit = {"requests_per_minute": LIMITED_REQUESTS}
    await server.ask("PUT", f"/admin/organizations/{ORGANIZATIONS[-1]}", limit)
    keys = [(await server.create_key(each)).text for each in ORGANIZATIONS]
    states = [OrganizationState() for _ in ORGANIZATIONS]
    model = msgspec.json.decode((await server.ask("GET", "/v1/models")).body)["data"][0]["id"]
    return [
        Client(
            number,
            server,
            results,
            fuzzer,
            organization=ORGANIZATIONS[number % len(keys)],
            key=keys[number % len(keys)],
            state=states[number % len(keys)],
            model=model,
            pause=options.pause,
            seed=options.seed,
        )
        for number in range(options.clients)
    ]


async def _show_progress(console: Console, results: Results, until: float) -> None:
    while True:
        await asyncio.sleep(PROGRESS_SECONDS)
        left = max(0, round(until - time.monotonic()))
        last = results.faults[-1].kind if results.faults else "none"
        console.print(f"{left:4} s left, {sum(results.outcomes.values()):,} requests, last fault: {last}")


def _about(options: Options) -> str:
    what = f"{options.fuzz:,} fuzzed requests" if options.fuzz else f"{options.clients} clients"
    duration = "" if options.fuzz else f", {options.minutes:g} minutes"
    database = "SQLite" if "://" not in options.database else "PostgreSQL"
    today = datetime.date.today().isoformat()
    return f"{today}, SmolLM2-135M, {what}{duration}, {database}, seed {options.seed}, {cpu_name()}, {cores()} cores."


def parse(arguments: list[str] | None) -> tuple[Options, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0, help="how long clients and faults run (15)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MINUTES:g} minutes, {QUICK_CLIENTS} clients")
    parser.add_argument("--clients", type=int, default=200, help="number of clients (200)")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds between the requests of a client (2)")
    parser.add_argument("--database", default="sqlite", help="sqlite, or the URL of an empty PostgreSQL database")
    parser.add_argument("--fuzz", type=int, default=0, metavar="N", help="send N fuzzed requests instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the table to docs/development/soak.md")
    parser.add_argument("--keep-log", type=Path, help="copy the server's log to this file")
    given = parser.parse_args(arguments)
    options = Options(
        minutes=QUICK_MINUTES if given.quick else given.minutes,
        clients=QUICK_CLIENTS if given.quick else given.clients,
        pause=given.pause,
        seed=given.seed,
        database="" if given.database == "sqlite" else given.database,
        fuzz=given.fuzz,
    )
    return options, given


def main(arguments: list[str] | None = None) -> int:
    options, given = parse(arguments)
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="syringa-soak-") as folder:
        try:
            check_complete()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                report = runner.run(soak(options, Path(folder), console))
        except StartupError as error:
            console.print(f"[red]{error.message}[/]")
            return 1
        except KeyboardInterrupt:
            console.print("[yellow]interrupted: server stopped, nothing written[/]")
            return 130
        finally:
            if given.keep_log is not None and (log := Path(folder) / "server.log").exists():
                given.keep_log.write_bytes(log.read_bytes())
    show(report, console)
    if given.write:
        write_page(report)
        console.print(f"written: {write_json(report)}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
