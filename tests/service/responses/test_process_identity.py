from __future__ import annotations

import os
import subprocess
import sys

from syringa.service.responses import process_identity


def test_a_process_that_runs_is_not_gone() -> None:
    assert not process_identity.is_gone(process_identity.name())
    assert process_identity.name() != process_identity.name()


def test_a_process_that_has_ended_is_gone() -> None:
    code = "from syringa.service import owner; print(process_identity.name())"
    name = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert process_identity.is_gone(name)


def test_a_process_id_that_was_given_again_is_gone() -> None:
    machine, pid, began, token = process_identity.name().split("/")
    assert pid == str(os.getpid())
    assert process_identity.is_gone("/".join((machine, pid, str(int(began) - 1), token)))


def test_of_other_machines_nothing_is_known() -> None:
    assert not process_identity.is_gone("elsewhere/1/2/3")
    assert not process_identity.is_gone("nonsense")
    assert not process_identity.is_gone("")
