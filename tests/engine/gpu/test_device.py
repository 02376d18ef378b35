from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syringa.engine.gpu import device as machine
from syringa.engine.scheduling.limits import Limits
from syringa.errors import ConfigError, ModelError

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`gpu(found, capability)`: what the machine is said to have."""

    def say(found: str | None, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(machine, "find_gpu", lambda: found)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    return say


@pytest.mark.parametrize(
    ("wanted", "dtype", "native", "found", "device"),
    [
        ("auto", "auto", True, None, "cuda"),
        ("auto", "auto", True, "no NVIDIA GPU is found", "cpu"),
        ("auto", "auto", False, None, "cuda"),  # a model on transformers' definition
        ("auto", "auto", False, "no NVIDIA GPU is found", "cpu"),
        ("auto", "int8", True, None, "cpu"),  # somebody asked for what a CPU has
        ("auto", "fp32", True, None, "cpu"),
        ("auto", "fp8", True, None, "cuda"),
        ("cpu", "auto", True, None, "cpu"),
        ("cuda", "bf16", True, None, "cuda"),
    ],
)
def test_where_a_model_goes(gpu: Any, wanted: str, dtype: str, native: bool, found: str | None, device: str) -> None:
    gpu(found)
    assert machine.choose_device(wanted, dtype, native=native).type == device


@pytest.mark.parametrize(
    ("wanted", "dtype", "native", "found", "says"),
    [
        ("cuda", "auto", True, "no NVIDIA GPU is found", "--device cuda needs a GPU, and no NVIDIA GPU is found"),
        ("auto", "fp8", True, "no NVIDIA GPU is found", "--dtype fp8 needs a GPU"),
        ("cpu", "fp8", True, None, "use --dtype int8 on a CPU"),
        ("cuda", "int8", True, None, "use --dtype bf16 or fp8"),
        ("cuda", "int8", False, None, "use --dtype bf16 with"),
        ("cuda", "fp8", False, None, "has no fp8: use --dtype bf16"),
        ("auto", "fp8", False, None, "has no fp8: use --dtype bf16"),
    ],
)
def test_what_cannot_be_had_is_refused(
    gpu: Any, wanted: str, dtype: str, native: bool, found: str | None, says: str
) -> None:
    gpu(found)
    with pytest.raises(ConfigError, match=says) as refused:
        machine.choose_device(wanted, dtype, native=native)
    assert "\n" not in refused.value.message


def test_fp8_needs_a_newer_gpu(gpu: Any) -> None:
    gpu(None, (8, 0))
    with pytest.raises(ConfigError, match=r"needs compute capability 8\.9, and this GPU has 8\.0: use bf16"):
        machine.choose_device("cuda", "fp8", native=True)


def test_a_driver_that_is_too_old_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it.")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", fail)
    assert machine.find_gpu() == "The NVIDIA driver on your system is too old (found version 11040)"


def test_a_gpu_without_bf16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    for name, value in (("init", None), ("is_available", True), ("device_count", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert machine.find_gpu() == "Tesla T4 has compute capability 7.5, and 8.0 is needed (Ampere or newer)"


def test_weights_that_do_not_fit_are_refused_with_what_would() -> None:
    machine.check_weights(8 * 10**9, "bf16", "m", 20 * GIB, "G")
    with pytest.raises(ModelError, match=r"needs about 15\.9 GiB in bf16, and 10\.0 GiB are free on G: --dtype fp8"):
        machine.check_weights(8 * 10**9, "bf16", "m", 10 * GIB, "G")
    with pytest.raises(ModelError, match="choose a smaller model, or --device cpu"):
        machine.check_weights(8 * 10**9, "fp8", "m", 5 * GIB, "G")
    with pytest.raises(ModelError, match=r"10\.0 GiB are free on G: choose a smaller model, or --device cpu"):
        machine.check_weights(8 * 10**9, "bf16", "m", 10 * GIB, "G", halvable=False)


def test_the_cache_gets_what_is_left() -> None:
    assert machine.blocks_that_fit(10 * GIB, 1 << 20, 16, 0, halvable=True) == 10 * 1024
    assert machine.blocks_that_fit(10 * GIB, 1 << 20, 16, 77, halvable=True) == 77
    with pytest.raises(ConfigError, match=r"a cache of 320,000 tokens needs 19\.5 GiB on the GPU"):
        machine.blocks_that_fit(10 * GIB, 1 << 20, 16, 20_000, halvable=True)
    with pytest.raises(ModelError, match="no room for a cache beside the weights: use --dtype fp8"):
        machine.blocks_that_fit(-GIB, 1 << 20, 16, 0, halvable=True)
    with pytest.raises(ModelError, match="no room for a cache beside the weights: use a smaller --step-tokens"):
        machine.blocks_that_fit(-GIB, 1 << 20, 16, 0, halvable=False)


@pytest.fixture
def sized(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`sized(free, …)`: how many blocks of 1 MiB a model gets on a GPU of 100 GiB that has this many GiB free."""
    model_module = pytest.importorskip("syringa.engine.gpu.model")

    def size(free: int, fraction: float, *, allocated: int = 20, longest: int = 160, tokens: int = 0) -> int:
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free * GIB, 100 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated * GIB)
        monkeypatch.setattr(model_module.GpuModel, "rehearse", lambda self, tokens: 0)
        shape: Any = SimpleNamespace(bytes_per_block=1 << 20, device=torch.device("cuda"))
        decoder: Any = SimpleNamespace(vocabulary=0, beside=0, halvable=True)
        model = model_module.GpuModel(decoder, shape, longest)
        return int(model.blocks(tokens, 0.0, Limits(gpu_memory_fraction=fraction)))

    return size


def test_a_cache_takes_its_share_of_the_gpu(sized: Any) -> None:
    room = machine.MARGIN * 100 * 1024 + 1024  # what is left alone, and room for graphs
    for fraction in (0.0, 1.0):
        assert sized(80, fraction) == pytest.approx(80 * 1024 - room, abs=2)
    # Half of the GPU, of which 20 GiB are taken by the weights already, and something by the context.
    assert sized(80, 0.5) == pytest.approx(0.94 * 50 * 1024 - 20 * 1024 - 600 - 1024, abs=2)
    assert sized(10, 0.5) == pytest.approx(10 * 1024 - room, abs=2)  # others have taken more than was thought
    assert sized(80, 0.5, tokens=77 * 16) == 77


def test_a_share_that_is_too_small_has_room_for_one_sequence(sized: Any) -> None:
    """Where there is memory for it: what a model needs was only guessed."""
    assert sized(80, 0.1, longest=16_000) == 1000
    with pytest.raises(ModelError, match="no room for a cache"):
        sized(6, 0.1, longest=16_000)
