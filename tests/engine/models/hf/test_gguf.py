"""Models on `transformers`' definitions from GGUF files, compared with `transformers` itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from syringa.engine.cpu.layers.linear import BlockLinear, Int8Linear
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.hf.int8 import HFNativeLinear
from syringa.engine.models.hf.model import HFModel
from syringa.engine.worker.core import EngineCore
from syringa.errors import ConfigError, ModelError
from tests.engine.conftest import drive, request
from tests.engine.models.gguf_models import (
    FAMILIES,
    NATIVE,
    TinyGguf,
    edit_gguf,
    q8_0,
    relative_error,
    save_gguf,
    save_wide_gguf,
    tiny_config,
    write_gguf,
)
from tests.engine.models.tiny_models import PROMPTS, difference, reference, run, save
from tests.tiers import slow

MAIN = ["qwen2moe", "glm4", "cohere2"]  # the others differ from these in data only
OTHERS = sorted(FAMILIES.keys() - {*MAIN, *NATIVE})


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    """`tiny_gguf(family)` returns a GGUF file in F32 and transformers' instance of the model."""
    return functools.cache(lambda family: save_gguf(tmp_path_factory.mktemp(family), family))


def load(path: Path, dtype: str = "fp32") -> LoadedModel:
    loaded = load_model(LoadOptions(model=str(path), dtype=dtype, threads=1))
    assert isinstance(loaded.model, HFModel)
    return loaded


def linear_layers(loaded: LoadedModel) -> list[object]:
    assert isinstance(loaded.model, HFModel)
    return [module.linear for module in loaded.model.model.modules() if isinstance(module, HFNativeLinear)]


@pytest.mark.parametrize("family", [*MAIN, *slow(*OTHERS)])
def test_gguf_logits_match_transformers(tiny_gguf: TinyGguf, family: str) -> None:
    path, hf_model = tiny_gguf(family)
    for got, prompt in zip(run(load(path), PROMPTS, chunk=20), PROMPTS, strict=True):
        assert difference(got, reference(hf_model, prompt)) < 1e-3


@pytest.mark.parametrize("family", ["qwen2moe", "glm4"])
def test_gguf_greedy_tokens_match_transformers(tiny_gguf: TinyGguf, family: str) -> None:
    path, hf_model = tiny_gguf(family)
    core = EngineCore(load(path), kv_cache_tokens=512)
    stopping = {"ignore_eos": True}
    requests = [request(str(i), p, max_tokens=8, temperature=0.0, stopping=stopping) for i, p in enumerate(PROMPTS[:2])]
    answers = drive(core, requests)
    core.close()
    for i, prompt in enumerate(PROMPTS[:2]):
        expected = list(prompt)
        for _ in range(8):
            expected.append(int(reference(hf_model, expected)[-1].argmax()))
        assert answers[str(i), 0].tokens == expected[len(prompt) :]


@pytest.mark.parametrize("family", ["olmo2", *slow("qwen2moe", "cohere2")])
def test_quantized_gguf_is_close_to_original_model(tmp_path: Path, family: str) -> None:
    # Blocks of 32 weights.
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64} if family == "qwen2moe" else {}
    path, hf_model = save_gguf(tmp_path, family, q8_0, **sizes)
    expected = reference(hf_model, PROMPTS[0])
    for dtype, tolerance in (("fp32", 0.03), ("bf16", 0.05), ("int8", 0.1), ("gguf", 0.05)):
        got = run(load(path, dtype), PROMPTS[:1])[0]
        assert relative_error(got, expected) < tolerance, dtype


@pytest.mark.parametrize("family", ["glm4", "qwen2moe"])
def test_gguf_blocks_are_close_to_dequantized_weights(tmp_path: Path, family: str) -> None:
    path = save_wide_gguf(tmp_path, family, "Q4_K")
    loaded = load(path, "gguf")
    dequantized = run(load(path), PROMPTS[:1])[0]
    assert relative_error(run(loaded, PROMPTS[:1])[0], dequantized) < 0.03
    if family == "glm4":  # PyTorch's routers may round differently in a batch
        assert torch.equal(run(loaded, PROMPTS[:1])[0], run(loaded, PROMPTS)[0])
    linears = linear_layers(loaded)
    assert all(isinstance(linear, BlockLinear) for linear in linears)
    assert len(linears) >= 4 * 2 + 1  # attention, and the output head with the embedding's blocks
    # Nothing is left in full precision but norms, biases and routers.
    assert isinstance(loaded.model, HFModel)
    assert all(parameter.numel() <= 2048 for parameter in loaded.model.model.parameters())


def test_gguf_dtype_quantizes_tensors_of_other_types_to_int8(tmp_path: Path) -> None:
    path, hf_model = save_gguf(tmp_path, "glm4", lambda name, data: (data, gguf.GGMLQuantizationType.F32))
    loaded = load(path, "gguf")
    assert all(isinstance(linear, Int8Linear) for linear in linear_layers(loaded))
    assert relative_error(run(loaded, PROMPTS[:1])[0], reference(hf_model, PROMPTS[0])) < 0.1


@pytest.mark.parametrize(
    ("family", "edit", "added", "message"),
    [
        (
            "glm4",
            lambda name: None if name == "blk.3.attn_q.bias" else name,
            "",
            "has no tensor for 'model.layers.3.self_attn.q_proj.bias'",
        ),
        (
            "qwen2moe",
            lambda name: name.replace("blk.1.ffn_up_exps", "blk.1.ffn_up.0"),
            "",
            r"Qwen2MoeForCausalLM has no parameter for 'blk.1.ffn_up.0.weight'",
        ),
        (
            "glm4",
            lambda name: name,
            "blk.1.ffn_down.bias",
            "Glm4ForCausalLM has no parameter for 'blk.1.ffn_down.bias'",
        ),
    ],
)
def test_gguf_with_missing_or_other_tensors_is_refused(
    tiny_gguf: TinyGguf, family: str, edit: Callable[[str], str | None], added: str, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(edit_gguf(tiny_gguf(family)[0], edit, {added: np.zeros(64, np.float32)} if added else {}))


@pytest.mark.parametrize("dtype", ["fp32", "gguf"])
@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight and blk.1.ffn_up_exps.weight have different shapes"),
        ("blk.1.ffn_down_exps.weight", r"down_proj is \[.*\], and by the model's config"),
    ],
)
def test_gguf_with_tensors_of_other_shapes_is_refused(tmp_path: Path, tensor: str, message: str, dtype: str) -> None:
    def quantize(name: str, data: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if name == tensor:  # as many blocks in wider rows
            data = data.reshape(data.shape[0], data.shape[1] // 2, data.shape[2] * 2)
        return q8_0(name, data)

    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    path, _ = save_gguf(tmp_path, "qwen2moe", quantize, **sizes)
    with pytest.raises(ModelError, match=message):
        load(path, dtype)


def test_gguf_with_weights_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path, tiny_config("olmo2"))
    model.model.layers[2].mlp.down_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"blk.2.ffn_down.weight is corrupt: a weight is not a finite number"):
        load(write_gguf(tmp_path / "model.gguf", "olmo2", model))


def test_gguf_on_transformers_definition_refuses_deterministic_mode(tiny_gguf: TinyGguf) -> None:
    with pytest.raises(ConfigError, match="transformers' definitions"):
        load_model(LoadOptions(model=str(tiny_gguf("glm4")[0]), threads=1, deterministic=True))
