"""Choice of the dtype and the memory check."""

from __future__ import annotations

import pytest

from syringa.engine.loading import precision
from syringa.engine.loading.model_size import ModelSize
from syringa.errors import ConfigError, ModelError


def test_check_memory_refuses_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "available_memory", lambda: 4 << 30)
    precision.check_memory(3_000_000_000, "int8", "small")
    with pytest.raises(ModelError, match=r"large needs about 15\.4 GiB in bf16 and 4\.0 GiB are free"):
        precision.check_memory(8_000_000_000, "bf16", "large")


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
