from __future__ import annotations

import pytest

from syringa.engine.cpu.features import NO_MEMORY
from syringa.engine.gpu.device import num_cache_blocks
from syringa.engine.processes import managed_process
from syringa.engine.worker.server import exit_status
from syringa.errors import ModelError, StartupError


def test_exit_status_tells_which_memory_was_short() -> None:
    """The supervisor evicts a worker that uses the same kind of memory."""
    assert exit_status(ModelError("…", code=NO_MEMORY)) == managed_process.EXIT_NO_MEMORY
    with pytest.raises(StartupError) as refused:
        num_cache_blocks(-1, 1, 16, 0, supports_fp8=True)
    assert exit_status(refused.value) == managed_process.EXIT_NO_GPU_MEMORY
    assert exit_status(ModelError("its file is cut short")) == managed_process.EXIT_CANNOT_START
    assert {
        managed_process.EXIT_NO_MEMORY,
        managed_process.EXIT_NO_GPU_MEMORY,
        managed_process.EXIT_CANNOT_START,
    } == set(managed_process.REPORTED_STATUSES)
