from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syringa.engine.gpu import device as gpu_device
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.errors import ModelError

GIB = 2**30


@pytest.fixture
def num_blocks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that computes the cache blocks of 1 MiB for a GPU of 100 GiB with `free` GiB free."""
    model_module = pytest.importorskip("syringa.engine.gpu.model")

    def compute(free: int, fraction: float, *, allocated: int = 20, longest: int = 160, tokens: int = 0) -> int:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 100 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated * GIB)
        monkeypatch.setattr(model_module.GpuModel, "profile_peak_memory", lambda self, tokens: 0)
        shape: Any = SimpleNamespace(bytes_per_block=1 << 20, device=torch.device("cuda"))
        decoder: Any = SimpleNamespace(vocabulary=0, concurrent_bytes=0, supports_fp8=True)
        model = model_module.GpuModel(decoder, shape, longest)
        return int(model.num_blocks(tokens, 0.0, SchedulerLimits(gpu_memory_fraction=fraction)))

    return compute


def test_num_blocks_respects_memory_fraction(num_blocks: Any) -> None:
    reserve = gpu_device.GPU_MARGIN * 100 * 1024 + 1024  # MiB: margin and CUDA graphs
    for fraction in (0.0, 1.0):
        assert num_blocks(80, fraction) == pytest.approx(80 * 1024 - reserve, abs=2)
    # Half of the GPU, of which weights take 20 GiB, and the CUDA context some.
    assert num_blocks(80, 0.5) == pytest.approx(0.94 * 50 * 1024 - 20 * 1024 - 600 - 1024, abs=2)
    assert num_blocks(10, 0.5) == pytest.approx(10 * 1024 - reserve, abs=2)  # other processes use more than expected
    assert num_blocks(80, 0.5, tokens=77 * 16) == 77


def test_num_blocks_fits_one_sequence_in_small_share(num_blocks: Any) -> None:
    """A share that is too small is exceeded as long as there is free memory."""
    assert num_blocks(80, 0.1, longest=16_000) == 1000
    with pytest.raises(ModelError, match="no room for a cache"):
        num_blocks(6, 0.1, longest=16_000)
