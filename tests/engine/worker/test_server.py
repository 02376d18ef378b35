from __future__ import annotations

import pytest

from syringa.engine.cpu.features import NO_MEMORY
from syringa.engine.gpu.device import blocks_that_fit
from syringa.engine.processes import managed_process
from syringa.engine.worker.server import _exit_status
from syringa.errors import ModelError, StartupError


def test_a_worker_says_whose_memory_it_lacked() -> None:
    """By its exit status: the supervisor then has somebody leave who takes some of the same."""
    assert _exit_status(ModelError("…", code=NO_MEMORY)) == managed_process.NO_MEMORY
    with pytest.raises(StartupError) as refused:
        blocks_that_fit(-1, 1, 16, 0, halvable=True)
    assert _exit_status(refused.value) == managed_process.NO_GPU_MEMORY
    assert _exit_status(ModelError("its file is cut short")) == managed_process.CANNOT_START
    assert {managed_process.NO_MEMORY, managed_process.NO_GPU_MEMORY, managed_process.CANNOT_START} == set(
        managed_process.SAID
    )
