"""Choice of the dtype and the memory check."""

from __future__ import annotations

import pytest

from syringa.engine.loading import precision
from syringa.errors import ConfigError, ModelError


def test_check_memory_refuses_model_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "available_memory", lambda: 4 << 30)
    precision.check_memory(3_000_000_000, "int8", "small")
    with pytest.raises(ModelError, match=r"large needs about 15\.4 GiB in bf16 and 4\.0 GiB are free"):
        precision.check_memory(8_000_000_000, "bf16", "large")


def test_choose_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        precision.choose_dtype("int8", None)
    monkeypatch.setattr(precision, "cpu_flags", lambda: {"avx2"})
    assert precision.choose_dtype("auto", None) == "fp32"
    monkeypatch.setattr(precision, "cpu_flags", lambda: {"avx2", "avx512_bf16"})
    assert precision.choose_dtype("auto", None) == "bf16"
    assert precision.choose_dtype("fp32", None) == "fp32"
