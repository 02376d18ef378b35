"""Simulate a fleet of 1,000 nodes: `python -m bench.fleet_sim`. See docs/development/fleet-scale.md."""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import time

import msgspec
from rich.console import Console

from bench.fleet_sim import report
from bench.fleet_sim.rejections import OTHER
from bench.fleet_sim.results import SimulationResult, outcome, summarize
from bench.fleet_sim.scenario import HOUR, MINUTE, Scenario, quick
from bench.fleet_sim.simulation import FleetSimulation
from syringa.bench.processes import cpu_name


def simulate(scenario: Scenario, seed: int, console: Console | None = None) -> SimulationResult:
    """Run a simulation and return its figures."""
    began, cpu = time.perf_counter(), time.process_time()
    simulation = FleetSimulation(scenario, seed)

    def progress(at: float) -> None:
        rejected = simulation.rejections.counts
        if console is not None and (at % HOUR == 0 or (at > scenario.day_seconds and at % (5 * MINUTE) == 0)):
            console.print(
                f"{at / HOUR:5.2f} h, {simulation.collector.arrived:,} requests, {len(simulation.fleet.running)} "
                f"replicas, {sum(rejected.values()):,} got 503, {rejected[OTHER]} of these for no known reason, "
                f"{(time.perf_counter() - began) / 60:.1f} minutes so far"
            )

    simulation.run(progress)
    if console is not None:
        for at, model, count in simulation.rejections.others:
            console.print(f"{at:.0f} s, {model}: {count} got 503 for no known reason")
    result = summarize(simulation, seed)
    result.cpu_minutes = (time.process_time() - cpu) / 60
    result.wall_minutes = (time.perf_counter() - began) / 60
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet_sim", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 nodes and a fiftieth of the requests, some seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="write the tables to docs/development/fleet-scale.md")
    parser.add_argument("--json", action="store_true", help="print what depends on the seed alone, as JSON")
    options = parser.parse_args(arguments)
    console = Console(highlight=False, quiet=options.json)
    gc.disable()  # nothing here is a cycle that matters, and a collection in a reconcile would count as its time
    result = simulate(quick() if options.quick else Scenario(), options.seed, console)
    if options.json:
        print(msgspec.json.encode(outcome(result)).decode())
    report.show(result, console)
    if options.write and not options.quick:
        cores = os.cpu_count() or 1
        machine = f"{cpu_name()}, " + ("1 core" if cores == 1 else f"{cores} cores")
        about = f"{datetime.date.today().isoformat()}, seed {result.seed}, one process ({machine})."
        console.print(f"written: {report.write(result, about)}")
    failures = result.failures(timing=not options.quick)
    for failure in failures:
        console.print(f"[red]{failure}[/]")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
