"""Disable AMX before any test computes: bf16 products fail where it is advertised but does not work."""

from __future__ import annotations

import pytest

from syringa.engine.cpu.features import available_cores, disable_broken_amx

disable_broken_amx("int8")  # caps oneDNN without probing, which would take seconds


@pytest.fixture(scope="session", autouse=True)
def kernel_threads() -> None:
    """Start the kernels' threads, once per process, before a model that is loaded with one thread does."""
    from syringa.engine.cpu.native import load_kernels

    load_kernels(available_cores())
