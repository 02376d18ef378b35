from __future__ import annotations

import subprocess

from syringa.engine.processes import managed_process


def test_terminate_accepts_a_child_that_ended_before_it_read_its_options() -> None:
    child = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    child.wait()
    assert child.stdin is not None
    child.stdin.write(b"options\n")  # stays in the buffer, and cannot be written
    managed_process.terminate(child, 1.0)
    assert child.stdin.closed
