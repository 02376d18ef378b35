from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from syringa.engine.processes import managed_process
from syringa.engine.processes.managed_process import ManagedProcess, spawn


class Options(msgspec.Struct):
    text: str


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> subprocess.Popen[bytes]:
    """Return a child that ended before its options could be written."""

    class EndedProcess(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            super().__init__(*arguments, **named)
            self.wait()

    monkeypatch.setattr(subprocess, "Popen", EndedProcess)
    return spawn("module", Options("x"), python="true")


def test_child_is_not_interrupted_while_it_imports(tmp_path: Path) -> None:
    (tmp_path / "importing.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as in background jobs
    try:
        process = spawn("importing", Options("x"), environment={"PYTHONPATH": str(tmp_path)})
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.wait(60) == 0
    managed_process.terminate(process, 0.0)


def test_child_that_ended_before_it_read_its_options_is_restarted(child: subprocess.Popen[bytes]) -> None:
    process = ManagedProcess("child", lambda: child)
    assert process.poll() is None  # it is started
    assert process.poll() == 0
    assert process.process is None


def test_child_that_ended_before_it_read_its_options_is_terminated(child: subprocess.Popen[bytes]) -> None:
    managed_process.terminate(child, 1.0)
    assert child.stdin is not None
    assert child.stdin.closed
