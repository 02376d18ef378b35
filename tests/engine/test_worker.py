from __future__ import annotations

import pytest

from syringa.engine import child
from syringa.engine.cpu import NO_MEMORY
from syringa.engine.gpu.machine import blocks_that_fit
from syringa.engine.worker import _exit_status
from syringa.errors import ModelError, StartupError


def test_a_worker_says_whose_memory_it_lacked() -> None:
    """By its exit status: the supervisor then has somebody leave who takes some of the same."""
    assert _exit_status(ModelError("…", code=NO_MEMORY)) == child.NO_MEMORY
    with pytest.raises(StartupError) as refused:
        blocks_that_fit(-1, 1, 16, 0, halvable=True)
    assert _exit_status(refused.value) == child.NO_GPU_MEMORY
    assert _exit_status(ModelError("its file is cut short")) == child.CANNOT_START
    assert {child.NO_MEMORY, child.NO_GPU_MEMORY, child.CANNOT_START} == set(child.SAID)
