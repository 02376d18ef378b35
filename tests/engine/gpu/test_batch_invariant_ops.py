"""`--deterministic`: what it computes with, and where it is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.config import Config, ModelSpec
from syringa.engine.gpu import batch_invariant_check
from syringa.engine.gpu import device as gpu_device
from syringa.engine.gpu.ops import base as ops_module
from syringa.engine.gpu.ops.batch_invariant_ops import BatchInvariantOps
from syringa.engine.loading.gpu_model import load_on_gpu
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.precision import check_deterministic_gpu
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError
from syringa.modelfiles import describe, locate
from tests.engine.gpu.tiny_models import CPU, load_tiny_gpu_model
from tests.engine.models.native_models import DENSE as MODELS
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, run, save
from tests.tiers import slow


@pytest.mark.parametrize("name", ["qwen3", *slow("llama biased", "mistral sliding")])
def test_decoder_matches_reference_ops(tmp_path: Path, name: str) -> None:
    """In chunks, so that steps have decode and prefill rows."""
    family, changes = MODELS[name]
    save(tmp_path, AutoConfig.for_model(family, **(SIZES | changes)))
    prompts = [PROMPTS[0][:16], PROMPTS[1][:5], PROMPTS[2][:11]]  # short: a step takes a second in the interpreter
    expected = run(load_tiny_gpu_model(tmp_path), prompts)
    batch_invariant = load_tiny_gpu_model(tmp_path, ops=BatchInvariantOps())
    for logits, wanted in zip(run(batch_invariant, prompts, chunk=5), expected, strict=True):
        assert difference(logits, wanted) < 1e-3


@pytest.mark.parametrize(
    ("kind", "head_size", "settings", "message"),
    [
        ("llama", 16, {"dtype": "fp32"}, "not for fp32"),
        ("llama", 16, {"dtype": "bf16", "native_kernels": False}, "compiled kernels"),
        ("llama", 24, {}, "this model's are of 24"),
        ("olmo2", 16, {}, "transformers' definitions"),
    ],
)
def test_deterministic_is_rejected_on_cpu(
    kind: str, head_size: int, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save(tmp_path, AutoConfig.for_model(kind, **(SIZES | {"head_dim": head_size})))
    with pytest.raises(ConfigError, match=message):
        load_model(LoadOptions(str(tmp_path), deterministic=True, device="cpu", **settings))


def test_deterministic_loads_on_cpu(tmp_path: Path) -> None:
    save(tmp_path, AutoConfig.for_model("llama", **SIZES))
    assert load_model(LoadOptions(str(tmp_path), deterministic=True, device="cpu")).info.dtype == "int8"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "fp8", "native": True}, "not for fp8"),
        ({"dtype": "auto", "native": True, "attention": "flashinfer"}, "our own attention"),
        ({"dtype": "auto", "native": False}, "transformers' definitions"),
    ],
)
def test_deterministic_is_rejected_on_gpu(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_deterministic_gpu(**settings)


def test_deterministic_option_reaches_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The option selects the kernels, and the batch invariance check runs before the model serves."""
    save(tmp_path, AutoConfig.for_model("qwen3", **SIZES))
    checked: list[LoadedModel] = []
    monkeypatch.setattr(batch_invariant_check, "check_batch_invariance", checked.append)
    monkeypatch.setattr(ops_module, "choose_ops", lambda device, attention, *, deterministic: BatchInvariantOps())
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "G")
    monkeypatch.setattr(gpu_device, "free_memory", lambda device: 8 << 30)
    options = WorkerOptions.from_config(ModelSpec(id="a", path=str(tmp_path), deterministic=True), Config())
    assert options.deterministic
    files = locate(str(tmp_path))
    load_options = LoadOptions(str(tmp_path), deterministic=options.deterministic)
    model = load_on_gpu(load_options, files, describe(files), CPU, None)
    assert checked == [model]
    with pytest.raises(ConfigError, match="fp8"):
        load_on_gpu(LoadOptions(str(tmp_path), "fp8", deterministic=True), files, describe(files), CPU, None)
