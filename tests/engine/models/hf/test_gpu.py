"""`transformers`' models on the GPU code path, on a CPU with the reference implementations of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from syringa.engine.gpu.cache import GpuCacheShape
from syringa.engine.gpu.ops.base import ReferenceOps
from syringa.engine.loading.gpu_model import wrap_gpu_model
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.hf import gpu
from syringa.engine.models.hf.gpu import HFGpuDecoder, can_capture_graphs
from syringa.engine.models.hf.model import load_hf_model
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ModelError
from syringa.modelfiles import describe, locate
from tests.engine.conftest import Driver, request
from tests.engine.gpu.tiny_models import nan_filled_cache
from tests.engine.models.hf.test_model import config_of
from tests.engine.models.tiny_models import PROMPTS, difference, reference, run, save

CPU = torch.device("cpu")
# On the kernels: windows, a custom scale, layers with different heads, experts, softcap, sinks. The last two on
# PyTorch: keys longer than values, small heads.
FAMILIES: dict[str, dict[str, Any]] = {
    "olmo3": {},
    "granite": {},
    "gemma4_text": {},
    "gpt2": {},
    "granitemoe": {},
    "vaultgemma": {},
    "granite_swa": {},
    "deepseek_v3": {},
    "cohere2": {"head_dim": 8},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, waking a second thread costs many times the work of such small operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(folder: Path, dtype: str = "fp32") -> LoadedModel:
    files = locate(str(folder))
    description = describe(files)
    found = load_hf_model(files, description, dtype, None, description.max_model_len, 1, CPU)
    assert found.gpu is not None
    assert found.model is found.gpu
    return wrap_gpu_model(found.gpu, description, found.parameters, dtype, 0.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_hf_logits_match_transformers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model = save(tmp_path, config_of(family, **FAMILIES[family]))
    loaded = load(tmp_path)
    expected = [reference(hf_model, prompt) for prompt in PROMPTS]
    batches = [run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=13), run(loaded, PROMPTS[:2], chunk=1)]
    monkeypatch.setattr(gpu, "MAX_SCORES", 2000)  # the PyTorch path then takes a few rows or sequences at a time
    batches += [run(loaded, PROMPTS), run(loaded, PROMPTS[:2], chunk=1)]
    for batch in batches:
        for got, wanted in zip(batch, expected, strict=False):
            assert difference(got, wanted) < 1e-3


@pytest.mark.parametrize(
    ("family", "changes", "kernels"),
    [
        ("olmo3", {}, True),
        ("gemma4_text", {}, True),
        ("gemma4_text", {"global_head_dim": 512}, False),
        ("vaultgemma", {}, True),
        ("granite_swa", {}, True),
        ("deepseek_v3", {}, False),
        ("cohere2", {"head_dim": 8}, False),
    ],
)
def test_gpu_hf_attention_uses_kernels_where_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, changes: dict[str, Any], kernels: bool
) -> None:
    save(tmp_path, config_of(family, **changes))
    loaded = load(tmp_path)
    called: list[torch.Tensor] = []
    attend = gpu.attend

    def watched(*arguments: Any) -> torch.Tensor:
        called.append(arguments[0])
        return attend(*arguments)

    monkeypatch.setattr(gpu, "attend", watched)
    run(loaded, PROMPTS[:2], chunk=20)
    assert (not called) == kernels


def test_gpu_hf_attention_reads_no_unwritten_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, config_of("deepseek_v3"))
    loaded = load(tmp_path)
    expected = run(loaded, PROMPTS, chunk=13)

    monkeypatch.setattr(GpuCacheShape, "allocate", nan_filled_cache)
    for got, wanted in zip(run(loaded, PROMPTS, chunk=13), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("family", ["deepseek_v3", "starcoder2"])
def test_gpu_hf_engine_matches_cpu_engine(tmp_path: Path, family: str) -> None:
    """With async scheduling, forks, a preemption, and sampling parameters that only the host supports."""
    save(tmp_path, config_of(family))
    rules: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"choices": 3}]
    answers = []
    for loaded in (
        load_model(LoadOptions(model=str(tmp_path), dtype="fp32", threads=1, device="cpu")),
        load(tmp_path),
    ):
        core = EngineCore(loaded, SchedulerLimits(step_tokens=40, max_running=8), kv_cache_tokens=256)
        assert (core.runner is None) == (loaded.gpu is None)
        driver = Driver(core)
        for i, prompt in enumerate([*PROMPTS, *PROMPTS]):
            options = {"max_tokens": 30, "stopping": {"ignore_eos": True}, "seed": i} | rules[i % 4]
            driver.submit(request(str(i), prompt, **options))
        answers.append({key: (answer.tokens, answer.finish) for key, answer in driver.finish().items()})
        stats = core.stats()
        assert stats.preemptions
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        core.close()
    assert answers[0] == answers[1]


def test_padding_rows_write_no_other_cache_slots(tmp_path: Path) -> None:
    """With five sequences in a graph for eight, the cache changes only in their slots."""
    save(tmp_path, config_of("starcoder2"))
    core = EngineCore(load(tmp_path), SchedulerLimits(max_running=8), kv_cache_tokens=320)
    driver = Driver(core)
    for i in range(5):
        driver.submit(request(str(i), [5 + i] * 9, max_tokens=12, stopping={"ignore_eos": True}))
    driver.step(2)
    core.cache.keys.nan_to_num_(0.0).add_(1.0)  # otherwise repeated writes of the same values would go unnoticed
    before = core.cache.keys.clone()
    driver.step()
    changed = (core.cache.keys != before).any(-1).any(2)[0].nonzero().tolist()
    held = {(s.block_table[(s.computed - 1) // 16], (s.computed - 1) % 16) for s in core.scheduler.running}
    assert {tuple(at) for at in changed} == held
    assert len(held) == 5
    driver.finish()
    core.close()


@pytest.mark.parametrize(
    ("family", "supports_cuda_graphs"), [("starcoder2", True), ("vaultgemma", True), ("deepseek_v3", False)]
)
def test_cuda_graphs_need_kernels_for_all_layers(tmp_path: Path, family: str, supports_cuda_graphs: bool) -> None:
    save(tmp_path, config_of(family))
    loaded = load(tmp_path)
    assert loaded.gpu is not None
    assert loaded.gpu.decoder.supports_cuda_graphs == supports_cuda_graphs


def test_can_capture_graphs_checks_replayed_logits_and_synchronization(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, config_of("starcoder2"))
    loaded = load(tmp_path)
    assert loaded.gpu is not None
    decoder: Any = loaded.gpu.decoder
    monkeypatch.setattr(gpu, "_forbid_synchronization", nullcontext)
    assert can_capture_graphs(decoder)
    forward, calls = decoder.forward, []

    def changing(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        logits: torch.Tensor = forward(*arguments)
        return logits.mul_(-1.0) if len(calls) > 1 else logits

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "forward", changing)
        assert not can_capture_graphs(decoder)

    @contextmanager
    def refused() -> Iterator[None]:
        raise RuntimeError("called a synchronizing CUDA operation")
        yield

    monkeypatch.setattr(gpu, "_forbid_synchronization", refused)
    assert not can_capture_graphs(decoder)


def test_gpu_hf_bf16_is_close_to_fp32(tmp_path: Path) -> None:
    hf_model = save(tmp_path, config_of("olmo3"))
    loaded = load(tmp_path, "bf16")
    assert loaded.cache.dtype == torch.bfloat16
    assert loaded.gpu is not None
    assert isinstance(loaded.gpu.decoder, HFGpuDecoder)
    assert isinstance(loaded.gpu.decoder.ops, ReferenceOps)
    expected = reference(hf_model, PROMPTS[0])
    error = run(loaded, PROMPTS[:1])[0] - expected
    assert float(error.norm() / expected.norm()) < 0.03


def test_batch_check_refuses_gpu_model_that_mixes_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, config_of("starcoder2"))
    forward = HFGpuDecoder.forward

    def mixing(self: HFGpuDecoder, rows: Any, *rest: Any) -> torch.Tensor:
        logits = forward(self, rows, *rest)
        return logits + logits.mean() * 5 * len(rows.tokens)

    monkeypatch.setattr(HFGpuDecoder, "forward", mixing)
    with pytest.raises(ModelError, match="mixes tokens outside attention"):
        load(tmp_path)
