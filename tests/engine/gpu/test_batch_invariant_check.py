from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from triton.runtime.errors import OutOfResources

from syringa.engine.gpu import batch_invariant_check
from syringa.engine.gpu import device as gpu_device
from syringa.engine.gpu.cache import FP8
from syringa.engine.gpu.kernels.batch_invariant_matmul import (
    TiledMatmulConfig,
    batch_invariant_matmul,
)
from syringa.engine.gpu.kernels.prefill_attention import prefill_attention
from syringa.engine.gpu.ops.batch_invariant_ops import BatchInvariantOps
from syringa.engine.loading.gpu_model import load_on_gpu
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.errors import ConfigError
from syringa.modelfiles import describe, locate
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.tiny_models import SIZES, save

TILES = [TiledMatmulConfig(32, 16, 32, 1, 1, group=2), TiledMatmulConfig(16, 64, 16, 1, 1)]


def test_check_rejects_gpu_that_is_not_batch_invariant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, AutoConfig.for_model("llama", **SIZES))
    loaded = load_tiny_gpu_model(tmp_path, ops=BatchInvariantOps())
    for name in ("matmul_is_batch_invariant", "attention_is_batch_invariant"):
        monkeypatch.setattr(batch_invariant_check, name, lambda *_: True)
    batch_invariant_check.check_batch_invariance(loaded)
    monkeypatch.setattr(batch_invariant_check, "attention_is_batch_invariant", lambda *_: False)
    with pytest.raises(ConfigError, match="attention depend on the batch"):
        batch_invariant_check.check_batch_invariance(loaded)
    monkeypatch.setattr(batch_invariant_check, "matmul_is_batch_invariant", lambda *_: False)
    with pytest.raises(ConfigError, match=r"matmuls with \d+ × \d+ weights"):
        batch_invariant_check.check_batch_invariance(loaded)

    def too_large(*_: Any) -> bool:
        raise OutOfResources(163_840, 101_376, "shared memory")

    monkeypatch.setattr(batch_invariant_check, "matmul_is_batch_invariant", too_large)
    with pytest.raises(ConfigError, match="do not fit this GPU"):
        batch_invariant_check.check_batch_invariance(loaded)


def test_matmul_check_detects_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums that are exact in any order pass; a small difference for one batch size is detected."""
    weight = torch.ones(8, 16)
    monkeypatch.setattr(batch_invariant_check, "random_like", lambda like, *shape, seed=0: torch.ones(*shape))
    monkeypatch.setattr(batch_invariant_check, "TILED_CONFIGS", dict.fromkeys(TILES, 0))
    bias = torch.ones(8)
    assert batch_invariant_check.matmul_is_batch_invariant(weight, bias)

    def batch_dependent(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        return batch_invariant_matmul(x, weight, *rest) + (1e-3 if len(x) == 17 else 0)

    monkeypatch.setattr(batch_invariant_check, "batch_invariant_matmul", batch_dependent)
    assert not batch_invariant_check.matmul_is_batch_invariant(weight, bias)


@pytest.mark.parametrize("cache", [torch.float32, FP8])
def test_attention_check_reads_cache_of_its_dtype(monkeypatch: pytest.MonkeyPatch, cache: torch.dtype) -> None:
    """Sums of ones are exact in any order and pass; a small difference for one chunk is detected."""
    monkeypatch.setattr(batch_invariant_check, "LENGTH", 40)
    monkeypatch.setattr(batch_invariant_check, "random_like", lambda like, *shape, seed=0: torch.ones(*shape))
    found: set[torch.dtype] = set()
    errors: dict[int, float] = {}

    def prefill(q: torch.Tensor, keys: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        found.add(keys.dtype)
        return prefill_attention(q, keys, *rest, **options) + errors.get(len(q), 0)

    monkeypatch.setattr(batch_invariant_check, "prefill_attention", prefill)

    def is_batch_invariant() -> bool:
        return batch_invariant_check.attention_is_batch_invariant(
            BatchInvariantOps(), heads=2, kv_heads=1, size=16, window=0, like=torch.ones(1), cache=cache
        )

    assert is_batch_invariant()
    assert found == {cache}
    errors[3] = 1e-3  # the last chunk
    assert not is_batch_invariant()


def test_check_covers_the_cache_that_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, AutoConfig.for_model("llama", **SIZES))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    monkeypatch.setattr(gpu_device, "free_memory", lambda device: 8 << 30)
    checked: list[LoadedModel] = []
    monkeypatch.setattr(batch_invariant_check, "check_batch_invariance", checked.append)
    files = locate(str(tmp_path))
    options = LoadOptions(str(tmp_path), deterministic=True, kv_cache_dtype="fp8")
    loaded = load_on_gpu(options, files, describe(files), torch.device("cpu"), None)
    assert checked == [loaded]
    assert loaded.gpu is not None
    assert loaded.gpu.shape.dtype == loaded.cache.dtype == FP8
