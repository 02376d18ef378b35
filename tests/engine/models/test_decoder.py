"""The native decoder compared with `transformers`, in fp32, on tiny models of each family."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.cpu.layers.experts import ExpertWeights, NativeExperts, Routing, TorchExperts
from syringa.engine.cpu.layers.linear import DenseLinear, Gate, Int8Linear
from syringa.engine.cpu.layers.ops import GatedLinear
from syringa.engine.cpu.native import load_kernels
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.config import read_config
from syringa.engine.models.decoder import Decoder
from syringa.engine.models.fused import FusedDecoder
from syringa.engine.worker.core import EngineCore
from syringa.errors import ModelError
from syringa.modelfiles import describe, locate, read_gguf
from syringa.modelfiles.gguf_architectures import find_architecture
from tests.engine.conftest import drive, request
from tests.engine.loading.gguf_files import write_gguf
from tests.engine.models.native_models import DENSE, GEMMA, MOE
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, reference, run, save

MODELS = DENSE | MOE | GEMMA


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tiny_model(name)` returns the folder of a model and transformers' instance of it."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            family, changes = MODELS[name]
            folder = tmp_path_factory.mktemp(family)
            made[name] = folder, save(folder, AutoConfig.for_model(family, **(SIZES | changes)))
        return made[name]

    return get


def load(folder: Path, dtype: str = "fp32", native_kernels: bool = True) -> LoadedModel:
    options = LoadOptions(model=str(folder), dtype=dtype, threads=1, native_kernels=native_kernels)
    loaded = load_model(options)
    assert isinstance(loaded.model, Decoder | FusedDecoder)
    return loaded


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", MODELS)
def test_decoder_logits_match_transformers(tiny_model: Any, name: str, kernels: bool) -> None:
    folder, hf_model = tiny_model(name)
    loaded = load(folder, native_kernels=kernels)
    expected = [reference(hf_model, prompt) for prompt in PROMPTS]
    alone = [run(loaded, [prompt])[0] for prompt in PROMPTS]
    for batch in (alone, run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=13)):
        for got, wanted in zip(batch, expected, strict=True):
            assert difference(got, wanted) < 1e-3
    decoded = run(loaded, PROMPTS[:1], chunk=1)[0]
    assert difference(decoded, expected[0]) < 1e-3


@pytest.mark.parametrize(
    "name", ["llama biased", "mistral sliding", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "phi3", "gpt_oss"]
)
def test_decoder_greedy_tokens_match_transformers(tiny_model: Any, name: str) -> None:
    folder, hf_model = tiny_model(name)
    core = EngineCore(load(folder), kv_cache_tokens=1024)
    core_requests = [
        request(str(i), prompt, max_tokens=12, temperature=0.0, stopping={"ignore_eos": True})
        for i, prompt in enumerate(PROMPTS)
    ]
    answers = drive(core, core_requests)
    core.close()
    for i, prompt in enumerate(PROMPTS):
        tokens = list(prompt)
        for _ in range(12):
            tokens.append(int(reference(hf_model, tokens)[-1].argmax()))
        assert answers[str(i), 0].tokens == tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["llama biased", "mistral sliding", "qwen3", "gemma2", "gemma3", "phi3 sliding"])
def test_decoder_bf16_and_int8_are_accurate_and_batch_invariant(tiny_model: Any, name: str) -> None:
    folder, hf_model = tiny_model(name)
    expected = reference(hf_model, PROMPTS[0])
    for dtype, tolerance in (("bf16", 0.03), ("int8", 0.08)):
        loaded = load(folder, dtype)
        alone = run(loaded, PROMPTS[:1])[0]
        assert float((alone - expected).norm() / expected.norm()) < tolerance, dtype
        assert torch.equal(alone, run(loaded, PROMPTS)[0]), dtype
        assert torch.equal(alone, run(loaded, PROMPTS, chunk=13)[0]), dtype


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "glm4_moe shared"])
def test_experts_in_bf16_and_int8_are_accurate_and_batch_invariant(tiny_model: Any, name: str) -> None:
    folder, hf_model = tiny_model(name)
    expected = reference(hf_model, PROMPTS[0])
    for dtype, tolerance in (("bf16", 0.03), ("int8", 0.08)):
        loaded = load(folder, dtype)
        alone = run(loaded, PROMPTS[:1])[0]
        errors = (alone - expected).norm(dim=1) / expected.norm(dim=1)
        # Rounding changes the choice between experts that are nearly tied, for a few tokens.
        assert float(errors.median()) < tolerance, dtype
        for chunk in (0, 13, 1):
            assert torch.equal(alone, run(loaded, PROMPTS, chunk=chunk)[0]), dtype


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe shared"])
def test_experts_of_the_kernels_match_those_of_torch(tiny_model: Any, name: str) -> None:
    """The same quantized layers, one by one in PyTorch and in one call."""
    loaded: Any = load(tiny_model(name)[0], "int8")
    expected = run(loaded, PROMPTS[:2])
    parts = loaded.model.embedding, loaded.model.layers, loaded.model.norm, loaded.model.head
    replaced = 0
    for layer in loaded.model.layers:
        if isinstance(layer.mlp, NativeExperts):
            layer.mlp = TorchExperts(loaded.model.ops, layer.mlp.weights, layer.mlp.routing)
            replaced += 1
    assert replaced
    apart = replace(loaded, model=Decoder(loaded.model.config, loaded.model.ops, *parts))
    for got, wanted in zip(run(apart, PROMPTS[:2]), expected, strict=True):
        assert difference(got, wanted) < 1e-4


def test_hostile_router_logits_choose_different_experts() -> None:
    """NaN logits must not make the kernels read an expert that is not there."""
    kernels = load_kernels(1)
    if kernels is None:
        pytest.skip("no kernels were built: there was no compiler")
    ops: Any = None
    gate = Gate()
    dense = [DenseLinear(kernels, torch.full((4, 16), float("nan")), None, torch.float32)]
    experts = [
        (GatedLinear(Int8Linear(kernels, torch.randn(64, 16), None, gate=gate), gate, ops),
         Int8Linear(kernels, torch.randn(16, 32), None))
        for _ in range(4)
    ]  # fmt: skip
    layer = NativeExperts(kernels, ExpertWeights(dense[0], experts), Routing(3, normalize=True), 16)
    x = torch.zeros(5, 16)
    layer(torch.randn(5, 16), x)
    assert x.isnan().all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gpt_oss"])
def test_logits_of_some_rows_are_those_of_all(tiny_model: Any, name: str, dtype: str) -> None:
    """The last layer's output is computed for those rows only."""
    loaded = load(tiny_model(name)[0], dtype)
    whole = torch.cat(run(loaded, PROMPTS))
    for rows in ([44, 47, 117, 133], [0], range(5, 90), []):
        assert torch.equal(run(loaded, PROMPTS, rows=rows)[0], whole[list(rows)])


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("smollm3", {"tie_word_embeddings": True}),
        # Only layers without rotary embedding have the window.
        ("smollm3", {"use_sliding_window": True, "sliding_window": 12, "no_rope_layer_interval": 4}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    ],
)
def test_decoder_config_defaults_match_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    config = AutoConfig.for_model(family, **(SIZES | {"tie_word_embeddings": False} | changes))
    hf_model = save(tmp_path, config)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    left_out = ["no_rope_layers", "no_rope_layer_interval", "layer_types"]
    for name in [*left_out, *(["tie_word_embeddings"] if config.tie_word_embeddings else [])]:
        written.pop(name, None)
    path.write_text(json.dumps(written))
    got = run(load(tmp_path), PROMPTS[:1])[0]
    assert difference(got, reference(hf_model, PROMPTS[0])) < 1e-3


@pytest.mark.parametrize(("window", "kind"), [(8, "mistral"), (0, "llama")])
def test_llama_gguf_file_with_a_window_is_mistral(tmp_path: Path, window: int, kind: str) -> None:
    """llama.cpp's converter names Mistral llama, and turns its rotary embedding like Llama's."""
    files = locate(str(write_gguf(tmp_path / "m.gguf", window=window)))
    config = describe(files).config
    assert config["model_type"] == kind
    assert read_config(config).windows == (window,)
    architecture = find_architecture(read_gguf(files.path).metadata)
    assert architecture is not None
    assert architecture.interleaved_rope


def test_check_shapes_refuses_weights_that_contradict_config(tmp_path: Path) -> None:
    save(tmp_path, AutoConfig.for_model("llama", **SIZES))
    path = tmp_path / "config.json"
    text = path.read_text()
    path.write_text(text.replace('"intermediate_size": 96', '"intermediate_size": 112'))
    with pytest.raises(ModelError, match=r"gate_proj.weight is \[96, 64\], and its config says \[112, 64\]"):
        load(tmp_path)
    path.write_text(text.replace('"num_hidden_layers": 4', '"num_hidden_layers": 5'))
    with pytest.raises(ModelError, match=r"no tensor for 'model.layers.4"):
        load(tmp_path)
