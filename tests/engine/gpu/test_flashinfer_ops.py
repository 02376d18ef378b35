"""Which kernel prompts get, and what FlashInfer is told: by a stand-in that computes from what it is told."""

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
from syringa.engine.gpu import device as machine
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.ops import base as ops_module
from syringa.engine.gpu.ops import flashinfer_ops
from syringa.engine.gpu.ops.base import ReferenceOps, choose_ops
from syringa.engine.gpu.ops.flashinfer_ops import FlashInferOps, Step, missing
from syringa.engine.gpu.ops.triton_ops import TritonOps
from syringa.engine.loading import loader
from syringa.engine.scheduling.scheduler import Limits
from syringa.engine.worker import server
from syringa.engine.worker.core import EngineCore
from syringa.engine.worker.server import WorkerOptions
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import describe, locate
from tests.engine.conftest import Driver, request
from tests.engine.gpu.fake_flashinfer import fake_flashinfer
from tests.engine.gpu.paged import EXACT, Paged, distance, poisoned, random
from tests.engine.gpu.small_gpu import load_small
from tests.engine.models.small import SIZES, save

CUDA = torch.device("cuda")
FIRST, COUNTS, STARTS = [0, 20, 37, 15], [25, 18, 1, 1], [0, 25, 43, 44, 45]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """FlashInfer, on a Hopper GPU."""
    module = fake_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer_ops, "find_spec", lambda name: module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    return module.BatchPrefillWithPagedKVCacheWrapper


class Layer:
    """A layer's attention over four sequences that begin, go on, and add one token each."""

    def __init__(
        self, heads: int, kv_heads: int, size: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
    ) -> None:
        self.heads, self.size = heads, size
        self.cache = Paged([f + c for f, c in zip(FIRST, COUNTS, strict=True)], kv_heads, size, seed=seed + 1)
        self.keys, self.values = self.cache.keys.to(dtype), self.cache.values.to(dtype)
        # Rows as they come: keys and values behind the queries.
        self.qkv = random(45, (heads + 2 * kv_heads) * size, seed=seed).to(dtype)
        self.places = torch.tensor(STARTS, dtype=torch.int32), torch.tensor(FIRST, dtype=torch.int32)

    def expected(self, window: int = 0, scale: float | None = None) -> torch.Tensor:
        q = self.qkv[:, : self.heads * self.size].unflatten(1, (self.heads, self.size))
        cache = self.keys, self.values, self.cache.tables
        return reference.paged_attention(q, *cache, *self.places, window=window, scale=scale).flatten(1)

    def by(self, ops: FlashInferOps, tiles: Any, window: int = 0, scale: float | None = None) -> torch.Tensor:
        out = poisoned(45, self.heads * self.size, dtype=self.qkv.dtype)
        cache = self.keys, self.values, self.cache.tables
        tile = torch.from_numpy(tiles)
        return ops.prefill_attention(self.qkv, *cache, tile, *self.places, self.heads, window, out, scale)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "window", "scale"),
    [(4, 2, 64, 0, None), (2, 2, 128, 0, 0.3), (4, 1, 64, 20, None), (2, 1, 64, 1, None), (2, 1, 256, 0, None)],
)
def test_what_flashinfer_is_told(
    library: Any, heads: int, kv_heads: int, size: int, window: int, scale: float | None
) -> None:
    ops, layer = FlashInferOps(), Layer(heads, kv_heads, size)
    out = layer.by(ops, ops.tiles(STARTS, FIRST), window, scale)
    assert torch.equal(out, layer.expected(window, scale))
    assert [each.runs for each in library.made] == [1]


def test_a_step_is_planned_once_for_layers_that_are_alike(library: Any) -> None:
    ops, one, two = FlashInferOps(), Layer(4, 2, 64), Layer(4, 2, 64, seed=5)
    two.cache.tables, two.keys, two.values = one.cache.tables, one.keys.flip(-1), one.values.flip(-1)
    for _ in range(2):
        tiles = ops.tiles(STARTS, FIRST)
        for layer, window in ((one, 0), (two, 20), (two, 0), (one, 20)):
            assert torch.equal(layer.by(ops, tiles, window), layer.expected(window))
    assert [(each.window, each.plans, each.runs) for each in library.made] == [(0, 2, 4), (20, 2, 4)]


def test_a_step_like_the_last_one_may_have_other_blocks(library: Any) -> None:
    ops = FlashInferOps()
    for seed in (1, 2):
        layer = Layer(4, 2, 64, seed=seed)
        assert torch.equal(layer.by(ops, ops.tiles(STARTS, FIRST)), layer.expected())
    assert len(library.made) == 1


@pytest.mark.parametrize(("size", "dtype"), [(96, torch.float32), (64, torch.float32)])
def test_what_it_has_no_kernel_for_is_ours(library: Any, size: int, dtype: torch.dtype) -> None:
    ops, layer = FlashInferOps(required=True), Layer(2, 1, size, dtype)
    assert distance(layer.by(ops, ops.tiles(STARTS, FIRST)), layer.expected()) < EXACT
    assert not library.made
    assert flashinfer_ops.Shape(2, 1, 96, 0, 1.0, torch.bfloat16).supported is False


def test_a_step_that_its_plan_has_no_room_for_is_ours(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_ops, "KINDS", (torch.float32,))
    ops, layer = FlashInferOps(), Layer(2, 1, 64, torch.float32)
    monkeypatch.setattr(flashinfer_ops, "PLAN_BYTES", 4 * 2 * flashinfer_ops.TILE_BYTES - 1)
    assert distance(layer.by(ops, ops.tiles(STARTS, FIRST)), layer.expected()) < EXACT
    assert not library.made
    monkeypatch.setattr(flashinfer_ops, "PLAN_BYTES", 4 * 2 * flashinfer_ops.TILE_BYTES)
    assert torch.equal(layer.by(ops, ops.tiles(STARTS, FIRST)), layer.expected())
    assert len(library.made) == 1


def test_tiles_are_counted_by_sequence() -> None:
    assert Step([0, 128, 257, 258], [5, 0, 9]).tiles == 1 + 2 + 1


def test_a_kernel_that_cannot_be_built(
    library: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(flashinfer_ops, "KINDS", (torch.float32,))
    library.failure = RuntimeError("Could not find nvcc.\nIt was looked for everywhere.")
    ops, layer = FlashInferOps(), Layer(2, 1, 64, torch.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert distance(layer.by(ops, ops.tiles(STARTS, FIRST)), layer.expected()) < EXACT
    assert caplog.messages == [
        "FlashInfer's attention is not ready for use (Could not find nvcc): ours is used. "
        "--attention flashinfer compiles it"
    ]
    ops = FlashInferOps(required=True)
    with pytest.raises(ConfigError, match=r"^--attention flashinfer: .*\(Could not find nvcc\): .*--attention triton$"):
        layer.by(ops, ops.tiles(STARTS, FIRST))


@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("before", [None, "1"])
def test_nothing_is_compiled_unless_it_was_asked_for(
    library: Any, monkeypatch: pytest.MonkeyPatch, required: bool, before: str | None
) -> None:
    monkeypatch.setattr(flashinfer_ops, "KINDS", (torch.float32,))
    monkeypatch.delenv(flashinfer_ops.NO_BUILDING, raising=False)
    if before is not None:
        monkeypatch.setenv(flashinfer_ops.NO_BUILDING, before)
    seen: list[str | None] = []
    plan = library.plan

    def watched(*arguments: Any, **named: Any) -> None:
        seen.append(os.environ.get(flashinfer_ops.NO_BUILDING))
        plan(*arguments, **named)

    monkeypatch.setattr(library, "plan", watched)
    ops, layer = FlashInferOps(required=required), Layer(2, 1, 64, torch.float32)
    layer.by(ops, ops.tiles(STARTS, FIRST))
    assert seen == [before if required else "1"]
    assert os.environ.get(flashinfer_ops.NO_BUILDING) == before


def test_the_choice(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(choose_ops(CUDA)) is type(choose_ops(CUDA, "flashinfer")) is FlashInferOps
    assert type(choose_ops(CUDA, "triton")) is TritonOps
    assert type(choose_ops(torch.device("cpu"), "flashinfer")) is ReferenceOps
    monkeypatch.setattr(flashinfer_ops, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "flashinfer")
    assert type(choose_ops(CUDA)) is TritonOps
    with pytest.raises(ConfigError, match=r"^--attention flashinfer: .* not installed: pip install 'syringa\[flashinf"):
        choose_ops(CUDA, "flashinfer")


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), (12, 0)])
def test_only_hopper_has_the_kernel(library: Any, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    assert type(choose_ops(CUDA)) is TritonOps
    with pytest.raises(ConfigError, match=rf"it needs a Hopper GPU .* {capability[0]}\.{capability[1]}$"):
        choose_ops(CUDA, "flashinfer")
    assert missing((9, 0)) is None


def test_an_installation_that_is_broken(
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


class Prompts(ReferenceOps):
    """Prompts' attention as FlashInfer's, the rest by the references: the interpreter would take a minute."""

    def __init__(self) -> None:
        self.kernels = FlashInferOps()

    def tiles(self, starts: Sequence[int], first: Sequence[int]) -> Any:
        return self.kernels.tiles(starts, first)

    def prefill_attention(self, *args: Any, **rest: Any) -> torch.Tensor:
        return self.kernels.prefill_attention(*args, **rest)


def test_the_engine_answers_alike(library: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Prompts in pieces, beside sequences that add one token."""
    monkeypatch.setattr(flashinfer_ops, "KINDS", (torch.float32,))
    monkeypatch.setattr(flashinfer_ops, "SIZES", (32,))
    save(tmp_path, AutoConfig.for_model("qwen3", **(SIZES | {"head_dim": 32})))
    answers = []
    for ops in (ReferenceOps(), Prompts()):
        core = EngineCore(load_small(tmp_path, ops=ops), Limits(step_tokens=40, max_running=5), kv_cache_tokens=480)
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


def test_the_setting_reaches_the_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save(tmp_path, AutoConfig.for_model("qwen3", **(SIZES | {"head_dim": 32})))
    asked, chosen = [], ReferenceOps()
    monkeypatch.setattr(ops_module, "choose_ops", lambda device, attention, **_: asked.append(attention) or chosen)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    monkeypatch.setattr(machine, "free_memory", lambda device: 8 << 30)
    spec = ModelSpec(id="a", path=str(tmp_path))
    options = WorkerOptions.of(spec, Config(attention="flashinfer"))
    wanted: list[loader.LoadOptions] = []

    def load(options: loader.LoadOptions, progress: Any) -> Any:
        wanted.append(options)
        raise ModelError("enough")

    monkeypatch.setattr(loader, "load_model", load)
    with pytest.raises(ModelError, match="enough"):
        server.load(options)
    files = locate(str(tmp_path))
    model = loader._load_on_gpu(wanted[0], files, describe(files), torch.device("cpu"), None)
    assert asked == ["flashinfer"]
    assert model.gpu is not None
    assert model.gpu.decoder.ops is chosen
