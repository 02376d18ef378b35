import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from syringa.bench import processes
from syringa.bench.load import run_load
from syringa.bench.processes import ServerSpec
from syringa.errors import StartupError

HEALTHY = """
import os, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *arguments): pass
# A grandchild that ignores SIGTERM, in its own process group: simple cleanup would miss it.
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], process_group=0, stdout=subprocess.PIPE)
child.stdout.readline()
open(sys.argv[2], "w").write(str(child.pid))
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def server(code: str, *arguments: str, timeout: float = 60.0) -> ServerSpec:
    return ServerSpec(
        name="fake",
        version="",
        precision="",
        command=lambda port, streams: [sys.executable, "-c", code, str(port), *arguments],
        start_timeout=timeout,
    )


def test_start_measures_and_stops_server_and_grandchildren(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid_file = tmp_path / "pid"
    stop = processes.stop
    monkeypatch.setattr(processes, "stop", lambda process: stop(process, timeout=0.3))
    with processes.start(server(HEALTHY, str(pid_file)), streams=1) as running:
        grandchild = int(pid_file.read_text())
        assert processes.process_tree(running.pid) == {running.pid, grandchild}
        assert processes.memory_rss(running.pid) >= processes.memory_pss(running.pid) > 2**20
        assert processes.cpu_seconds(running.pid) > 0
        assert running.started_at < time.perf_counter()
    assert processes.process_tree(running.pid) == set()
    assert not processes.is_alive(grandchild)


def test_machine_cpu_seconds_include_those_of_this_process() -> None:
    machine, own = processes.machine_cpu_seconds(), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    assert processes.machine_cpu_seconds() - machine >= 0.1  # counted in ticks of 10 ms


def test_start_reports_output_of_server_that_exits() -> None:
    code = "import sys; sys.exit('no such model')"
    with pytest.raises(StartupError, match=r"ended with code 1: \nno such model"), processes.start(server(code), 1):
        pass


def test_start_reports_output_of_server_that_dies_under_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dying = HEALTHY.replace(
        "do_GET(self):", "do_POST(self): sys.stderr.write('out of memory'), os._exit(3)\n    def do_GET(self):"
    )
    stop = processes.stop
    monkeypatch.setattr(processes, "stop", lambda process: stop(process, timeout=0.3))
    monkeypatch.setattr(processes, "_EXIT_SECONDS", 60.0)

    def load_until_it_dies() -> None:
        with processes.start(server(dying, str(tmp_path / "pid")), 1) as running:
            load = run_load(running.url, ["x"], model="m", max_tokens=1, streams=1)
            raise StartupError(f"{len(load.errors)} failed")

    with pytest.raises(StartupError, match=r"1 failed; fake ended with code 3: \nout of memory"):
        load_until_it_dies()


def test_start_times_out_and_stops_unresponsive_server() -> None:
    code = "import time; time.sleep(60)"
    with pytest.raises(StartupError, match="did not answer"), processes.start(server(code, timeout=0.2), 1):
        pass


def test_start_reports_missing_command() -> None:
    absent = ServerSpec(name="x", version="", precision="", command=lambda port, streams: ["/nonexistent/server"])
    with pytest.raises(StartupError, match="cannot be started"), processes.start(absent, 1):
        pass


def test_start_removes_variables_set_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYRINGA_PORT", "1")
    code = "import os, sys; sys.exit(os.environ.get('SYRINGA_PORT', 'not set'))"
    spec = ServerSpec(
        name="x",
        version="",
        precision="",
        command=lambda port, streams: [sys.executable, "-c", code],
        environment={"SYRINGA_PORT": None},
    )
    with pytest.raises(StartupError, match="not set"), processes.start(spec, 1):
        pass


def test_stop_accepts_finished_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"], start_new_session=True)
    process.wait()
    processes.stop(process)
    assert os.getpid() not in processes.process_tree(process.pid)
