from __future__ import annotations

import os
import subprocess
import sys

from syringa.service.responses import process_identity


def test_running_process_has_not_exited() -> None:
    assert not process_identity.has_exited(process_identity.new_identity())
    assert process_identity.new_identity() != process_identity.new_identity()


def test_ended_process_has_exited() -> None:
    code = "from syringa.service.responses import process_identity; print(process_identity.new_identity())"
    identity = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert process_identity.has_exited(identity)


def test_reused_process_id_has_exited() -> None:
    machine, pid, started, token = process_identity.new_identity().split("/")
    assert pid == str(os.getpid())
    assert process_identity.has_exited("/".join((machine, pid, str(int(started) - 1), token)))


def test_process_of_other_machine_is_assumed_alive() -> None:
    assert not process_identity.has_exited("elsewhere/1/2/3")
    assert not process_identity.has_exited("nonsense")
    assert not process_identity.has_exited("")
