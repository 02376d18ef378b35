from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from syringa.engine.processes.probes import RESTART_SECONDS, GrammarProbes, probe_path
from syringa.engine.structured_output.probe_protocol import ProbeOptions

OPTIONS = ProbeOptions(model="m", cpu_seconds=2.0, memory_bytes=1 << 20)


def test_grammar_probes_start_one_process_per_model_and_restart_dead_ones(tmp_path: Path) -> None:
    now, started = [0.0], []

    def spawn(options: ProbeOptions) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        started.append((options.model, options.socket, process))
        return process

    probes = GrammarProbes(str(tmp_path), spawn=spawn, clock=lambda: now[0])
    other = ProbeOptions(model="n", cpu_seconds=2.0, memory_bytes=1 << 20)
    for options in (OPTIONS, other, OPTIONS):
        probes.acquire(options)
    paths = [probe_path(str(tmp_path), each) for each in (OPTIONS, other)]
    assert [each[:2] for each in started] == [("m", paths[0]), ("n", paths[1])]
    started[0][2].kill()
    started[0][2].wait()
    probes.acquire(OPTIONS)
    assert len(started) == 2  # not at once: it may be unable to start
    now[0] += RESTART_SECONDS
    probes.acquire(OPTIONS)
    assert [each[0] for each in started] == ["m", "n", "m"]
    probes.stop()
    assert all(process.poll() is not None for _, _, process in started)
