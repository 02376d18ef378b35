"""The choice of the prefill attention kernel, and the arguments to FlashInfer, checked by a fake that uses them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.config import Config, ModelSpec
from syringa.engine.gpu import device as gpu_device
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.ops import base as ops_module
from syringa.engine.gpu.ops import flashinfer_ops
from syringa.engine.gpu.ops.base import ReferenceOps, choose_ops
from syringa.engine.gpu.ops.flashinfer_ops import FlashInferMetadata, FlashInferOps, missing_flashinfer
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.loading import loader
from syringa.engine.loading.gpu_model import load_on_gpu
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.engine.worker.options import WorkerOptions
from syringa.engine.worker.startup import load_engine
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import describe, locate
from tests.engine.conftest import Driver, request
from tests.engine.gpu.fake_flashinfer import fake_flashinfer
from tests.engine.gpu.kernel_inputs import FP32_TOLERANCE, PagedCache, nan_filled, random, relative_error
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.tiny_models import SIZES, save

CUDA = torch.device("cuda")
FIRST, COUNTS, STARTS = [0, 20, 37, 15], [25, 18, 1, 1], [0, 25, 43, 44, 45]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake FlashInfer on a Hopper GPU; returns its wrapper class."""
    module = fake_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_ops, "find_spec", lambda name: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return module.BatchPrefillWithPagedKVCacheWrapper


class Layer:
    """A layer's prefill attention over four sequences that start, continue, and add one token."""

    def __init__(
        self, heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> None:
        self.heads, self.size = heads, size
        self.cache = PagedCache([f + c for f, c in zip(FIRST, COUNTS, strict=True)], kv_heads, size, seed=seed + 1)
        self.keys, self.values = self.cache.keys.to(dtype), self.cache.values.to(dtype)
        # [q | k | v] rows.
        self.qkv = random(45, (heads + 2 * kv_heads) * size, seed=seed).to(dtype)
        self.layout = torch.tensor(STARTS, dtype=torch.int32), torch.tensor(FIRST, dtype=torch.int32)

    def expected(self, window: int = 0, scale: float | None = None) -> torch.Tensor:
        q = self.qkv[:, : self.heads * self.size].unflatten(1, (self.heads, self.size))
        cache = self.keys, self.values, self.cache.tables
        return reference.paged_attention(q, *cache, *self.layout, window=window, scale=scale).flatten(1)

    def run(self, ops: FlashInferOps, tiles: Any, window: int = 0, scale: float | None = None) -> torch.Tensor:
        out = nan_filled(45, self.heads * self.size, dtype=self.qkv.dtype)
        cache = self.keys, self.values, self.cache.tables
        tile = torch.from_numpy(tiles)
        return ops.prefill_attention(self.qkv, *cache, tile, *self.layout, self.heads, window, out, scale)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "scale"),
    [(4, 2, 64, 0, None), (2, 2, 128, 0, 0.3), (4, 1, 64, 20, None), (2, 1, 64, 1, None), (2, 1, 256, 0, None)],
)
def test_prefill_attention_matches_reference(
    library: Any, heads: int, kv_heads: int, size: int, window: int, scale: float | None
) -> None:
    ops, layer = FlashInferOps(), Layer(heads, kv_heads, size)
    out = layer.run(ops, ops.plan_prefill(STARTS, FIRST), window, scale)
    assert torch.equal(out, layer.expected(window, scale))
    assert [each.runs for each in library.made] == [1]


def test_step_is_planned_once_per_shape(library: Any) -> None:
    ops, one, two = FlashInferOps(), Layer(4, 2, 64), Layer(4, 2, 64, seed=5)
    two.cache.tables, two.keys, two.values = one.cache.tables, one.keys.flip(-1), one.values.flip(-1)
    for _ in range(2):
        tiles = ops.plan_prefill(STARTS, FIRST)
        for layer, window in ((one, 0), (two, 20), (two, 0), (one, 20)):
            assert torch.equal(layer.run(ops, tiles, window), layer.expected(window))
    assert [(each.window, each.plans, each.runs) for each in library.made] == [(0, 2, 4), (20, 2, 4)]


def test_equal_layout_with_other_blocks_is_planned_again(library: Any) -> None:
    ops = FlashInferOps()
    for seed in (1, 2):
        layer = Layer(4, 2, 64, seed=seed)
        assert torch.equal(layer.run(ops, ops.plan_prefill(STARTS, FIRST)), layer.expected())
    assert len(library.made) == 1


@pytest.mark.parametrize(("size", "dtype"), [(96, torch.float32), (64, torch.float32)])
def test_unsupported_shapes_use_triton(library: Any, size: int, dtype: torch.dtype) -> None:
    ops, layer = FlashInferOps(required=True), Layer(2, 1, size, dtype)
    assert relative_error(layer.run(ops, ops.plan_prefill(STARTS, FIRST)), layer.expected()) < FP32_TOLERANCE
    assert not library.made
    assert flashinfer_ops.FlashInferShape(2, 1, 96, 0, 1.0, torch.bfloat16).supported is False


def test_layer_with_sinks_uses_triton(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_ops, "DTYPES", (torch.float32,))
    ops, layer, sinks = FlashInferOps(), Layer(2, 1, 64, torch.float32), torch.tensor([0.5, 2.0])
    cache = layer.keys, layer.values, layer.cache.tables
    q = layer.qkv[:, :128].unflatten(1, (2, 64))
    expected = reference.paged_attention(q, *cache, *layer.layout, sinks=sinks).flatten(1)
    tiles = torch.from_numpy(ops.plan_prefill(STARTS, FIRST))
    out = ops.prefill_attention(layer.qkv, *cache, tiles, *layer.layout, 2, 0, nan_filled(45, 128), None, sinks)
    assert relative_error(out, expected) < FP32_TOLERANCE
    assert not library.made


def test_step_too_large_for_plan_uses_triton(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_ops, "DTYPES", (torch.float32,))
    ops, layer = FlashInferOps(), Layer(2, 1, 64, torch.float32)
    monkeypatch.setattr(flashinfer_ops, "PLAN_BYTES", 4 * 2 * flashinfer_ops.TILE_BYTES - 1)
    assert relative_error(layer.run(ops, ops.plan_prefill(STARTS, FIRST)), layer.expected()) < FP32_TOLERANCE
    assert not library.made
    monkeypatch.setattr(flashinfer_ops, "PLAN_BYTES", 4 * 2 * flashinfer_ops.TILE_BYTES)
    assert torch.equal(layer.run(ops, ops.plan_prefill(STARTS, FIRST)), layer.expected())
    assert len(library.made) == 1


def test_metadata_counts_tiles_per_sequence() -> None:
    assert FlashInferMetadata([0, 128, 257, 258], [5, 0, 9]).tiles == 1 + 2 + 1


def test_kernel_build_failure_falls_back_or_raises(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer_ops, "DTYPES", (torch.float32,))
    library.failure = RuntimeError("Could not find nvcc.\nIt was looked for everywhere.")
    ops, layer = FlashInferOps(), Layer(2, 1, 64, torch.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert relative_error(layer.run(ops, ops.plan_prefill(STARTS, FIRST)), layer.expected()) < FP32_TOLERANCE
    assert caplog.messages == [
        "FlashInfer attention is not prebuilt (Could not find nvcc); using Triton. --attention flashinfer compiles it"
    ]
    ops = FlashInferOps(required=True)
    with pytest.raises(ConfigError, match=r"^--attention flashinfer: .*\(Could not find nvcc\): .*--attention triton$"):
        layer.run(ops, ops.plan_prefill(STARTS, FIRST))


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("before", [None, "1"])
def test_jit_is_disabled_unless_required(
    library: Any, monkeypatch: pytest.MonkeyPatch, required: bool, before: str | None
) -> None:
    monkeypatch.setattr(flashinfer_ops, "DTYPES", (torch.float32,))
    monkeypatch.delenv(flashinfer_ops.DISABLE_JIT_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(flashinfer_ops.DISABLE_JIT_VARIABLE, before)
    seen: list[str | None] = []
    plan = library.plan

    def recording(*arguments: Any, **named: Any) -> None:
        seen.append(os.environ.get(flashinfer_ops.DISABLE_JIT_VARIABLE))
        plan(*arguments, **named)

    monkeypatch.setattr(library, "plan", recording)
    ops, layer = FlashInferOps(required=required), Layer(2, 1, 64, torch.float32)
    layer.run(ops, ops.plan_prefill(STARTS, FIRST))
    assert seen == [before if required else "1"]
    assert os.environ.get(flashinfer_ops.DISABLE_JIT_VARIABLE) == before


def test_choose_ops_prefers_flashinfer(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(choose_ops(CUDA)) is type(choose_ops(CUDA, "flashinfer")) is FlashInferOps
    assert type(choose_ops(CUDA, "triton")) is TritonOps
    assert type(choose_ops(torch.device("cpu"), "flashinfer")) is ReferenceOps
    monkeypatch.setattr(flashinfer_ops, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "flashinfer")
    assert type(choose_ops(CUDA)) is TritonOps
    with pytest.raises(ConfigError, match=r"^--attention flashinfer: .* not installed: pip install 'syringa\[flashinf"):
        choose_ops(CUDA, "flashinfer")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_choose_ops_requires_hopper_for_flashinfer(
    library: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert type(choose_ops(CUDA)) is TritonOps
    with pytest.raises(ConfigError, match=rf"it needs a Hopper GPU .* {capability[0]}\.{capability[1]}$"):
        choose_ops(CUDA, "flashinfer")
    assert missing_flashinfer((9, 0)) is None


def test_choose_ops_with_broken_installation(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(name: str) -> ModuleType:
        raise ImportError("libcudart.so.13: cannot open\nmore")

    monkeypatch.setattr(flashinfer_ops, "import_module", broken)
    with caplog.at_level(logging.WARNING):
        assert type(choose_ops(CUDA)) is TritonOps
    assert len(caplog.messages) == 1
    assert "libcudart.so.13: cannot open)" in caplog.messages[0]
    with pytest.raises(ConfigError, match=r"^--attention flashinfer: .*cannot open\)$"):
        choose_ops(CUDA, "flashinfer")


class FlashInferPrefillOps(ReferenceOps):
    """FlashInfer for prefill attention, the reference for everything else: the interpreter would take a minute."""

    def __init__(self) -> None:
        self.kernels = FlashInferOps()

    def plan_prefill(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        return self.kernels.plan_prefill(starts, first)

    def prefill_attention(self, *args: Any, **rest: Any) -> torch.Tensor:
        return self.kernels.prefill_attention(*args, **rest)


def test_engine_output_equals_reference_ops(library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Chunked prompts in steps with decode rows."""
    monkeypatch.setattr(flashinfer_ops, "DTYPES", (torch.float32,))
    monkeypatch.setattr(flashinfer_ops, "HEAD_DIMS", (32,))
    save(tmp_path, AutoConfig.for_model("qwen3", **(SIZES | {"head_dim": 32})))
    answers = []
    for ops in (ReferenceOps(), FlashInferPrefillOps()):
        core = EngineCore(
            load_tiny_gpu_model(tmp_path, ops=ops), SchedulerLimits(step_tokens=40, max_running=5), kv_cache_tokens=480
        )
        driver = Driver(core)
        prompts = [[5 + i, 9, 17] * n for i, n in enumerate((3, 22, 7, 14, 1, 9))]
        driver.submit(*(request(str(i), p, max_tokens=9, stopping={"ignore_eos": True}) for i, p in enumerate(prompts)))
        answers.append({key: answer.tokens for key, answer in driver.finish().items()})
        core.close()
    assert answers[0] == answers[1]
    assert all(len(tokens) == 9 for tokens in answers[1].values())
    (wrapper,) = library.made
    assert wrapper.plans > 2
    assert wrapper.runs == wrapper.plans * SIZES["num_hidden_layers"]


def test_attention_option_reaches_ops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save(tmp_path, AutoConfig.for_model("qwen3", **(SIZES | {"head_dim": 32})))
    requested, chosen = [], ReferenceOps()
    monkeypatch.setattr(ops_module, "choose_ops", lambda device, attention, **_: requested.append(attention) or chosen)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    monkeypatch.setattr(gpu_device, "free_memory", lambda device: 8 << 30)
    spec = ModelSpec(id="a", path=str(tmp_path))
    options = WorkerOptions.from_config(spec, Config(attention="flashinfer"))
    load_options: list[LoadOptions] = []

    def load(options: LoadOptions, progress: Any) -> Any:
        load_options.append(options)
        raise ModelError("stop here")

    monkeypatch.setattr(loader, "load_model", load)
    with pytest.raises(ModelError, match="stop here"):
        load_engine(options)
    files = locate(str(tmp_path))
    model = load_on_gpu(load_options[0], files, describe(files), torch.device("cpu"), None)
    assert requested == ["flashinfer"]
    assert model.gpu is not None
    assert model.gpu.decoder.ops is chosen
