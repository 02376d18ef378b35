"""What is planned and said about the memory of an embedding model, before it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from syringa.cli.startup import plan_rows
from syringa.engine.loading.memory_plan import (
    PROGRAM_BYTES,
    MemorySettings,
    least_memory,
    plan_gpu_memory,
    plan_memory,
)
from syringa.engine.loading.model_size import ModelSize, read_size
from syringa.errors import ConfigError, ModelError
from tests.embedding_models import MAX_LENGTH, write_embedding_folder

CONFIG = {"hidden_size": 384, "intermediate_size": 1536, "vocab_size": 30000, "num_hidden_layers": 6}


def size(path: Path, **config: Any) -> ModelSize:
    found = read_size(write_embedding_folder(path, **(CONFIG | config)))
    assert found is not None
    return found


def plan(model: ModelSize, free: int = 4 << 30, **settings: Any) -> Any:
    return plan_memory(model, MemorySettings(**settings), free=free, kernels="avx512", cores=2)


def test_plan_has_no_cache_whatever_the_settings_of_caches(tmp_path: Path) -> None:
    model = size(tmp_path)
    for settings in ({}, {"kv_cache_gb": 2.0}, {"kv_cache_tokens": 100_000}):
        found = plan(model, **settings)
        assert (found.cache, found.cache_tokens, found.context, found.dtype) == (0, 0, MAX_LENGTH, "int8")
        assert found.total == model.weights["int8"] + PROGRAM_BYTES + model.step_bytes
        assert least_memory(model, MemorySettings(**settings), "int8") == found.total


def test_plan_says_what_is_served(tmp_path: Path) -> None:
    rows = dict(plan_rows(plan(size(tmp_path / "a"))))
    assert rows["Serves"] == f"embeddings of texts of up to {MAX_LENGTH} tokens"
    assert "cache" not in rows["Memory"]
    scorer = size(tmp_path / "b", architectures=["BertForSequenceClassification"], num_labels=1)
    assert dict(plan_rows(plan(scorer)))["Serves"].startswith("scores of pairs of up to ")


def test_model_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="of memory"):
        plan(size(tmp_path), free=PROGRAM_BYTES // 2)


def test_length_above_the_model_s_is_refused(tmp_path: Path) -> None:
    model = size(tmp_path)
    assert plan(model, max_model_len=8).context == 8
    with pytest.raises(ConfigError, match="--max-model-len 4096"):
        plan(model, max_model_len=4096)


def test_plan_of_a_gpu_has_no_cache(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"total": 16 << 30, "overhead": 0, "fraction": 0.0, "cores": 2}
    found = plan_gpu_memory(size(tmp_path), MemorySettings(), free=8 << 30, **arguments)
    assert found is not None
    assert (found.device, found.dtype, found.cache) == ("cuda", "bf16", 0)
    assert plan_gpu_memory(size(tmp_path), MemorySettings(), free=1 << 20, **arguments) is None
