"""Choice of the dtype and the memory check."""

from __future__ import annotations

import pytest

from syringa.engine.loading import precision
from syringa.engine.loading.model_size import ModelSize
from syringa.errors import ConfigError, ModelError


def test_check_host_memory_refuses_weights_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "available_memory", lambda: 8_000_000_000)
    precision.check_host_memory(4_000_000_000, "bf16", "small")
    message = r"large needs 16\.0 GB of memory for its weights in fp32 while it is loaded and 8\.00 GB are free"
    with pytest.raises(ModelError, match=message):
        precision.check_host_memory(4_000_000_000, "fp32", "large")


def test_choose_dtype_without_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelSize(
        name="m", architecture="M", format="GGUF", parameters=8, native=True, weights={"gguf": 5}, max_model_len=16
    )
    for dtype in ("int8", "gguf"):
        with pytest.raises(ConfigError, match=f"--dtype {dtype} needs the compiled CPU kernels: install a C\\+\\+"):
            precision.choose_dtype(model, dtype, None)
    monkeypatch.setattr(precision, "cpu_flags", lambda: {"avx2"})
    assert precision.choose_dtype(model, "auto", None) == "fp32"
    monkeypatch.setattr(precision, "cpu_flags", lambda: {"avx2", "avx512_bf16"})
    assert precision.choose_dtype(model, "auto", None) == "bf16"
    assert precision.choose_dtype(model, "fp32", None) == "fp32"
    with pytest.raises(ConfigError, match="--dtype fp8 is for GPUs"):
        precision.choose_dtype(model, "fp8", "avx512")
