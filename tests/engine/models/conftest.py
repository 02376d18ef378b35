"""Read before any test here computes: bf16 products must not use AMX where it is only advertised."""

from __future__ import annotations

import pytest

from syringa.engine.cpu.features import available_cores, guard_against_amx

guard_against_amx("int8")  # caps oneDNN without probing, which would take seconds


@pytest.fixture(scope="session", autouse=True)
def kernel_threads() -> None:
    """The kernels' threads are started once a process: one-threaded small models must not decide how many there are."""
    from syringa.engine.cpu.native import load_kernels

    load_kernels(available_cores())
