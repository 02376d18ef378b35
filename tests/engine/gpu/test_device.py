from __future__ import annotations

from typing import Any

import pytest
import torch

from syringa.engine.gpu import device as gpu_device
from syringa.errors import ConfigError, ModelError

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that fakes the GPU: why it is unavailable (None: available), and its capability."""

    def fake(reason: str | None, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(gpu_device, "gpu_unavailable_reason", lambda: reason)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    return fake


@pytest.mark.parametrize(
    ("requested", "dtype", "native", "reason", "device"),
    [
        ("auto", "auto", True, None, "cuda"),
        ("auto", "auto", True, "no NVIDIA GPU is reason", "cpu"),
        ("auto", "auto", False, None, "cuda"),  # a model on transformers' definition
        ("auto", "auto", False, "no NVIDIA GPU is reason", "cpu"),
        ("auto", "int8", True, None, "cpu"),  # a precision that only a CPU has
        ("auto", "fp32", True, None, "cpu"),
        ("auto", "fp8", True, None, "cuda"),
        ("cpu", "auto", True, None, "cpu"),
        ("cuda", "bf16", True, None, "cuda"),
    ],
)
def test_choose_device(gpu: Any, requested: str, dtype: str, native: bool, reason: str | None, device: str) -> None:
    gpu(reason)
    assert gpu_device.choose_device(requested, dtype, native=native).type == device


@pytest.mark.parametrize(
    ("requested", "dtype", "native", "reason", "message"),
    [
        ("cuda", "auto", True, "no NVIDIA GPU is reason", "--device cuda needs a GPU, and no NVIDIA GPU is reason"),
        ("auto", "fp8", True, "no NVIDIA GPU is reason", "--dtype fp8 needs a GPU"),
        ("cpu", "fp8", True, None, "use --dtype int8 on a CPU"),
        ("cuda", "int8", True, None, "use --dtype bf16 or fp8"),
        ("cuda", "int8", False, None, "use --dtype bf16 with"),
        ("cuda", "fp8", False, None, "has no fp8: use --dtype bf16"),
        ("auto", "fp8", False, None, "has no fp8: use --dtype bf16"),
    ],
)
def test_choose_device_rejects_impossible_requests(
    gpu: Any, requested: str, dtype: str, native: bool, reason: str | None, message: str
) -> None:
    gpu(reason)
    with pytest.raises(ConfigError, match=message) as rejected:
        gpu_device.choose_device(requested, dtype, native=native)
    assert "\n" not in rejected.value.message


def test_choose_device_requires_fp8_capability(gpu: Any) -> None:
    gpu(None, (8, 0))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9, and this GPU has 8\.0: use --dtype bf16"):
        gpu_device.choose_device("cuda", "fp8", native=True)


def test_gpu_unavailable_reason_of_old_driver_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (reason version 11040).\nPlease update it.")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", fail)
    assert gpu_device.gpu_unavailable_reason() == "The NVIDIA driver on your system is too old (reason version 11040)"


def test_gpu_unavailable_reason_names_gpu_without_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name, value in (("init", None), ("is_available", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert (
        gpu_device.gpu_unavailable_reason()
        == "Tesla T4 has compute capability 7.5, and 8.0 is needed (Ampere or newer)"
    )


def test_check_weights_fit_suggests_what_fits() -> None:
    weights = {"bf16": 16 * 10**9, "fp8": 8 * 10**9}
    gpu_device.check_weights_fit(weights["bf16"], "bf16", "m", 20 * GIB, "G")
    with pytest.raises(ModelError, match=r"needs about 15\.9 GiB in bf16, and 10\.0 GiB are free on G: --dtype fp8"):
        gpu_device.check_weights_fit(weights["bf16"], "bf16", "m", 10 * GIB, "G", in_fp8=weights["fp8"])
    with pytest.raises(ModelError, match="choose a smaller model, or --device cpu"):
        gpu_device.check_weights_fit(weights["fp8"], "fp8", "m", 3 * GIB, "G", in_fp8=weights["fp8"])
    with pytest.raises(ModelError, match=r"10\.0 GiB are free on G: llama-3\.2-3b of `syringa models --ava"):
        gpu_device.check_weights_fit(weights["bf16"], "bf16", "m", 10 * GIB, "G")


def test_num_cache_blocks() -> None:
    assert gpu_device.num_cache_blocks(10 * GIB, 1 << 20, 16, 0, supports_fp8=True) == 10 * 1024
    assert gpu_device.num_cache_blocks(10 * GIB, 1 << 20, 16, 77, supports_fp8=True) == 77
    with pytest.raises(ConfigError, match=r"a cache of 320,000 tokens needs 19\.5 GiB on the GPU"):
        gpu_device.num_cache_blocks(10 * GIB, 1 << 20, 16, 20_000, supports_fp8=True)
    with pytest.raises(ModelError, match="no room for a cache beside the weights: use --dtype fp8"):
        gpu_device.num_cache_blocks(-GIB, 1 << 20, 16, 0, supports_fp8=True)
    with pytest.raises(ModelError, match="no room for a cache beside the weights: use a smaller --step-tokens"):
        gpu_device.num_cache_blocks(-GIB, 1 << 20, 16, 0, supports_fp8=False)
