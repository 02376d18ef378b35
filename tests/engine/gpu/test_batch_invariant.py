"""What `--deterministic` computes by on a GPU. The interpreter's sums are NumPy's, so bits are for a GPU to show
(`python -m bench.gpu_steady`); here the kernels are compared with their references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from triton.runtime.errors import OutOfResources

from syringa.config import Config, ModelSpec
from syringa.engine.gpu import batch_invariant_check
from syringa.engine.gpu import device as machine
from syringa.engine.gpu.kernels import reference
from syringa.engine.gpu.kernels.batch_invariant_attention import row_attention
from syringa.engine.gpu.kernels.batch_invariant_matmul import WIDE, WideConfig, choose, product
from syringa.engine.gpu.kernels.skinny_gemm import SkinnyConfig
from syringa.engine.gpu.ops import base as ops_module
from syringa.engine.gpu.ops.batch_invariant_ops import SteadyOps
from syringa.engine.gpu.ops.linear import SKINNY_ROWS
from syringa.engine.loading.loader import LoadedModel, LoadOptions, _load_on_gpu, load_model
from syringa.engine.loading.precision import check_deterministic
from syringa.engine.worker.server import WorkerOptions
from syringa.errors import ConfigError
from syringa.modelfiles import describe, locate
from tests.engine.gpu.paged import EXACT, Paged, distance, poisoned, random
from tests.engine.gpu.small_gpu import CPU, load_small
from tests.engine.gpu.test_attention import SHAPES
from tests.engine.models.small import PROMPTS, SIZES, difference, run, save
from tests.engine.models.test_decoder import MODELS

TILES = [SkinnyConfig(16, 64, 1, 1), WideConfig(32, 16, 32, 1, 1, band=2), WideConfig(16, 64, 16, 1, 1)]


@pytest.mark.parametrize("config", [None, *TILES], ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 96), (5, 130, 50), (64, 33, 32), (70, 100, 70)])
@pytest.mark.parametrize("bias", [False, True])
def test_product(config: SkinnyConfig | WideConfig | None, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    if isinstance(config, SkinnyConfig) and rows > SKINNY_ROWS:
        pytest.skip("more rows than that kernel takes")
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1)
    offset = random(outputs, seed=2) if bias else None
    out = product(x, weight, offset, out=poisoned(rows, outputs), config=config)
    assert distance(out, reference.linear(x, weight, offset)) < EXACT


def test_rows_that_are_part_of_others() -> None:
    x, weight = random(70, 3 * 40)[:, 40:80], random(24, 40, seed=1)
    for rows in (x[:3], x):
        assert distance(product(rows, weight), reference.linear(rows, weight)) < EXACT
    assert product(x[:0], weight).shape == (0, 24)


@pytest.mark.parametrize("outputs", [64, 1024, 4096, 24576, 151936])
def test_no_product_is_divided_among_programs(outputs: int) -> None:
    """Whose parts would be added up in an order of their own."""
    for rows in (1, 2, 16, 17, 64, 65, 256, 8192):
        config = choose(rows, outputs)
        assert isinstance(config, SkinnyConfig) == (rows <= SKINNY_ROWS)
        assert config in WIDE or (isinstance(config, SkinnyConfig) and config.splits == 1)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "block", "window"), SHAPES)
def test_row_attention(heads: int, kv_heads: int, size: int, block: int, window: int) -> None:
    cache = Paged([1, 16, 0, 33, 70], kv_heads, size, block)
    q = random(5, heads * size)
    given = cache.keys, cache.values, cache.tables, cache.lengths
    expected = reference.decode_attention(q.view(5, heads, size), *given, window=window)
    out = row_attention(q, *given, heads, window=window, out=poisoned(5, heads * size))
    assert distance(out, expected.flatten(1)) < EXACT
    assert not out[2].any(), "padding gives zeros"


@pytest.mark.parametrize("name", ["llama biased", "mistral sliding", "qwen3"])
def test_a_decoder(tmp_path: Path, name: str) -> None:
    """In chunks, so that some add one token and some several: as the references compute it."""
    family, changes = MODELS[name]
    save(tmp_path, AutoConfig.for_model(family, **(SIZES | changes)))
    prompts = [PROMPTS[0][:16], PROMPTS[1][:5], PROMPTS[2][:11]]  # interpreted, a step takes a second
    expected = run(load_small(tmp_path), prompts)
    for got, wanted in zip(run(load_small(tmp_path, ops=SteadyOps()), prompts, chunk=5), expected, strict=True):
        assert difference(got, wanted) < 1e-3


@pytest.mark.parametrize(
    ("kind", "head_size", "settings", "says"),
    [
        ("llama", 16, {"dtype": "fp32"}, "not for fp32"),
        ("llama", 16, {"dtype": "bf16", "native_kernels": False}, "compiled kernels"),
        ("llama", 24, {}, "this model's are of 24"),
        ("gemma", 16, {}, "transformers' definitions"),
    ],
)
def test_what_is_not_promised_on_a_cpu(
    kind: str, head_size: int, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    save(tmp_path, AutoConfig.for_model(kind, **(SIZES | {"head_dim": head_size})))
    with pytest.raises(ConfigError, match=says):
        load_model(LoadOptions(str(tmp_path), deterministic=True, device="cpu", **settings))


def test_what_is_promised_on_a_cpu(tmp_path: Path) -> None:
    save(tmp_path, AutoConfig.for_model("llama", **SIZES))
    assert load_model(LoadOptions(str(tmp_path), deterministic=True, device="cpu")).info.dtype == "int8"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dtype": "fp8", "native": True}, "not for fp8"),
        ({"dtype": "auto", "native": True, "attention": "flashinfer"}, "our own attention"),
        ({"dtype": "auto", "native": False}, "transformers' definitions"),
    ],
)
def test_what_is_not_promised_on_a_gpu(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_deterministic(**settings)


def test_a_gpu_that_does_not_keep_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, AutoConfig.for_model("llama", **SIZES))
    loaded = load_small(tmp_path, ops=SteadyOps())
    for name in ("products_agree", "attention_agrees"):
        monkeypatch.setattr(batch_invariant_check, name, lambda *_: True)
    batch_invariant_check.check_steady(loaded)
    monkeypatch.setattr(batch_invariant_check, "attention_agrees", lambda *_: False)
    with pytest.raises(ConfigError, match="attention depend on the batch"):
        batch_invariant_check.check_steady(loaded)
    monkeypatch.setattr(batch_invariant_check, "products_agree", lambda *_: False)
    with pytest.raises(ConfigError, match=r"products of \d+ × \d+ weights"):
        batch_invariant_check.check_steady(loaded)

    def too_large(*_: Any) -> bool:
        raise OutOfResources(163_840, 101_376, "shared memory")

    monkeypatch.setattr(batch_invariant_check, "products_agree", too_large)
    with pytest.raises(ConfigError, match="do not fit this GPU"):
        batch_invariant_check.check_steady(loaded)


def test_more_query_heads_than_a_tile_has_rows() -> None:
    cache = Paged([33, 5], 1, 32)
    q = random(2, 80 * 32)
    given = cache.keys, cache.values, cache.tables, cache.lengths
    expected = reference.decode_attention(q.view(2, 80, 32), *given)
    assert distance(row_attention(q, *given, 80, out=poisoned(2, 80 * 32)), expected.flatten(1)) < EXACT


def test_the_trial_sees_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are exact in any order agree; one bit in few rows is noticed."""
    weight = torch.ones(8, 16)
    monkeypatch.setattr(batch_invariant_check, "_random", lambda like, *shape, seed=0: torch.ones(*shape))
    monkeypatch.setattr(batch_invariant_check, "WIDE", dict.fromkeys(TILES[1:], 0))
    bias = torch.ones(8)
    assert batch_invariant_check.products_agree(weight, bias)

    def unsteady(x: torch.Tensor, weight: torch.Tensor, *given: Any) -> torch.Tensor:
        return product(x, weight, *given) + (1e-3 if len(x) == 17 else 0)

    monkeypatch.setattr(batch_invariant_check, "product", unsteady)
    assert not batch_invariant_check.products_agree(weight, bias)


def test_the_setting_reaches_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the command's settings to the kernels, and to the trial before it serves."""
    save(tmp_path, AutoConfig.for_model("qwen3", **SIZES))
    tried: list[LoadedModel] = []
    monkeypatch.setattr(batch_invariant_check, "check_steady", tried.append)
    monkeypatch.setattr(ops_module, "choose_ops", lambda device, attention, *, deterministic: SteadyOps())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    monkeypatch.setattr(machine, "free_memory", lambda device: 8 << 30)
    options = WorkerOptions.of(ModelSpec(id="a", path=str(tmp_path), deterministic=True), Config())
    assert options.deterministic
    files = locate(str(tmp_path))
    wanted = LoadOptions(str(tmp_path), deterministic=options.deterministic)
    model = _load_on_gpu(wanted, files, describe(files), CPU, None)
    assert tried == [model]
    with pytest.raises(ConfigError, match="fp8"):
        _load_on_gpu(LoadOptions(str(tmp_path), "fp8", deterministic=True), files, describe(files), CPU, None)
