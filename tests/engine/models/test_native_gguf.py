"""GGUF files of the native decoder's families that `loading.gguf_parameters` reads, compared with `transformers`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from syringa.engine.cpu.layers.experts import NativeExperts
from syringa.engine.cpu.layers.linear import BlockEmbedding, BlockLinear, Int8Linear, LinearLayer
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.config import LLAMA_TYPES
from syringa.engine.models.decoder import Decoder
from syringa.engine.models.fused import FusedDecoder
from syringa.engine.models.hybrid_config import HYBRID_TYPES
from syringa.engine.models.layers import Attention, Mlp
from syringa.engine.worker.core import EngineCore
from syringa.errors import ModelError
from syringa.modelfiles.gguf_architectures import ARCHITECTURES
from tests.engine.conftest import drive, request
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.gguf_models import (
    FAMILIES,
    NATIVE,
    Quantize,
    TinyGguf,
    edit_gguf,
    q8_0,
    random_quantization,
    relative_error,
    save_gguf,
    save_wide_gguf,
    tiny_config,
    write_gguf,
)
from tests.engine.models.tiny_models import PROMPTS, difference, reference, run, save
from tests.tiers import slow

EXPERTS = ("qwen3moe", "gpt-oss", "mixtral")
Q8_0_SIZES: dict[str, dict[str, Any]] = {"qwen3moe": {"moe_intermediate_size": 64}}  # blocks of 32 weights
UP_EXPERTS, DOWN_EXPERTS = "blk.1.ffn_up_exps.weight", "blk.1.ffn_down_exps.weight"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    """`tiny_gguf(family)` returns a GGUF file in F32 and transformers' instance of the model."""
    return functools.cache(lambda family: save_gguf(tmp_path_factory.mktemp(family), family))


@pytest.fixture(scope="module")
def q8_0_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    """The same in Q8_0."""

    def make(family: str) -> tuple[Path, Any]:
        return save_gguf(tmp_path_factory.mktemp(family), family, q8_0, **Q8_0_SIZES.get(family, {}))

    return functools.cache(make)


def load(path: Path, dtype: str = "fp32", **options: Any) -> LoadedModel:
    loaded = load_model(LoadOptions(model=str(path), dtype=dtype, threads=1, **options))
    assert isinstance(loaded.model, Decoder)
    return loaded


def linear_layers(loaded: LoadedModel) -> list[LinearLayer]:
    """Return the layers of a model that may be quantized; those of experts run in one call into the kernels."""
    assert isinstance(loaded.model, FusedDecoder)
    found: list[LinearLayer] = [loaded.model.head]
    for layer in loaded.model.layers:
        assert isinstance(layer.mixer, Attention)
        found += [layer.mixer.project, layer.mixer.out.linear]
        if isinstance(layer.mlp, Mlp):
            found += [layer.mlp.gate_up.linear, layer.mlp.down.linear]
        else:
            assert isinstance(layer.mlp, NativeExperts)
            found += [each for gate_up, down in layer.mlp.weights.experts for each in (gate_up.linear, down)]
    return found


def count_layers(family: str) -> int:
    """Return the number of `linear_layers` of a wide model."""
    experts = 4 if family in EXPERTS else 1
    return 1 + 2 * (2 + 2 * experts)


def test_every_architecture_but_llama_and_hybrid_ones_has_a_tiny_model() -> None:
    others = (*LLAMA_TYPES, *HYBRID_TYPES)
    found = {name for name, entry in ARCHITECTURES.items() if entry.model_type not in others}
    assert found == FAMILIES.keys() - {"mixtral"}


@pytest.mark.parametrize("family", NATIVE)
def test_gguf_logits_match_transformers(tiny_gguf: TinyGguf, family: str) -> None:
    path, hf_model = tiny_gguf(family)
    for got, prompt in zip(run(load(path), PROMPTS, chunk=20), PROMPTS, strict=True):
        assert difference(got, reference(hf_model, prompt)) < 1e-3


@pytest.mark.parametrize("family", ["gemma2", "phi3", "gpt-oss", "mixtral"])
def test_gguf_without_kernels_matches_the_same_file_with_them(q8_0_gguf: TinyGguf, family: str) -> None:
    path, _ = q8_0_gguf(family)
    expected = run(load(path), PROMPTS[:2])
    for got, wanted in zip(run(load(path, native_kernels=False), PROMPTS[:2]), expected, strict=True):
        assert difference(got, wanted) < 1e-3


def test_gguf_rope_factors_match_transformers(tmp_path: Path) -> None:
    short, long = [1.0 + i / 8 for i in range(8)], [4.0 + i for i in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    path, hf_model = save_gguf(tmp_path, "phi3", original_max_position_embeddings=32, rope_parameters=rope)
    loaded = load(path)
    for prompt in PROMPTS:  # transformers uses the long factors beyond 32 tokens, this engine for any 256-token context
        assert (difference(run(loaded, [prompt])[0], reference(hf_model, prompt)) < 1e-3) == (len(prompt) > 32)


@pytest.mark.parametrize("family", ["gemma3", "phi3", "qwen3moe", "gpt-oss"])
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


@pytest.mark.parametrize("family", NATIVE)
def test_quantized_gguf_is_close_to_original_model(q8_0_gguf: TinyGguf, family: str) -> None:
    path, hf_model = q8_0_gguf(family)
    expected = reference(hf_model, PROMPTS[0])
    for dtype, tolerance in (("fp32", 0.03), ("bf16", 0.05), ("int8", 0.1), ("gguf", 0.05)):
        got = run(load(path, dtype), PROMPTS[:1])[0]
        assert relative_error(got, expected) < tolerance, dtype


@pytest.mark.parametrize("dtype", ["bf16", "int8", "gguf"])
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", *slow("gemma", "gemma3", "phi3", "qwen3moe", "mixtral")])
def test_gguf_logits_are_batch_invariant(q8_0_gguf: TinyGguf, family: str, dtype: str) -> None:
    loaded = load(q8_0_gguf(family)[0], dtype, deterministic=True)
    alone = [run(loaded, [prompt])[0] for prompt in PROMPTS]
    for batch in (run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=13)):
        for got, wanted in zip(batch, alone, strict=True):
            assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        *[(family, "") for family in NATIVE if family != "gpt-oss"],
        ("gpt-oss", "MXFP4"),
        pytest.param("gpt-oss", "", marks=pytest.mark.slow),
        pytest.param("qwen3moe", "MXFP4", marks=pytest.mark.slow),
    ],
)
def test_gguf_blocks_are_close_to_dequantized_weights(tmp_path: Path, family: str, experts: str) -> None:
    path = save_wide_gguf(tmp_path, family, "Q4_K", experts)
    loaded = load(path, "gguf")
    linears = linear_layers(loaded)
    assert all(isinstance(linear, BlockLinear) for linear in linears)
    assert len(linears) == count_layers(family)
    assert isinstance(loaded.model, FusedDecoder)
    assert isinstance(loaded.model.embedding, BlockEmbedding)
    batch, dequantized = run(loaded, PROMPTS), run(load(path), PROMPTS)
    assert relative_error(torch.cat(batch), torch.cat(dequantized)) < 0.04
    for got, prompt in zip(batch, PROMPTS, strict=True):
        assert torch.equal(got, run(loaded, [prompt])[0])


@pytest.mark.parametrize("family", ["gemma3", "phi3", "gpt-oss", *slow("gemma", "gemma2", "qwen3moe", "mixtral")])
def test_gguf_dtype_quantizes_tensors_of_other_types_to_int8(tmp_path: Path, family: str) -> None:
    path, hf_model = save_gguf(tmp_path, family, lambda name, data: (data, gguf.GGMLQuantizationType.F32))
    loaded = load(path, "gguf")
    assert all(isinstance(linear, Int8Linear) for linear in linear_layers(loaded))
    assert relative_error(run(loaded, PROMPTS[:1])[0], reference(hf_model, PROMPTS[0])) < 0.1


@pytest.mark.parametrize("family", ["phi3", "gpt-oss", *slow("qwen3moe", "mixtral")])
def test_gguf_blocks_that_the_kernels_do_not_have_become_int8(tmp_path: Path, family: str) -> None:
    """The `gguf` package reads them, of phi3 the rows of each projection, and of others each expert."""
    path = save_wide_gguf(tmp_path, family, "Q2_K")
    loaded = load(path, "gguf")
    assert all(isinstance(linear, Int8Linear) for linear in linear_layers(loaded))
    assert relative_error(run(loaded, PROMPTS[:1])[0], run(load(path), PROMPTS[:1])[0]) < 0.1


def test_gguf_experts_whose_gates_and_ups_differ_in_type_become_int8(tmp_path: Path) -> None:
    types = {"gate": "Q5_K", "up": "Q6_K", "down": "Q4_K"}

    def quantize(name: str, data: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        kind = next((kind for part, kind in types.items() if f"ffn_{part}_exps" in name), "Q4_K")
        return random_quantization(kind, kind)(name, data)

    wide = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256, "num_hidden_layers": 2}
    path, _ = save_gguf(tmp_path, "qwen3moe", quantize, **wide)
    loaded = load(path, "gguf")
    assert isinstance(loaded.model, FusedDecoder)
    experts = loaded.model.layers[0].mlp
    assert isinstance(experts, NativeExperts)
    for gate_up, down in experts.weights.experts:
        assert isinstance(gate_up.linear, Int8Linear)
        assert isinstance(down, BlockLinear)
    assert relative_error(run(loaded, PROMPTS[:1])[0], run(load(path), PROMPTS[:1])[0]) < 0.1


@pytest.mark.parametrize("family", NATIVE)
def test_gguf_on_gpu_decoder_matches_transformers(tiny_gguf: TinyGguf, family: str) -> None:
    path, hf_model = tiny_gguf(family)
    got = run(load_tiny_gpu_model(path), PROMPTS[:2])
    for logits, prompt in zip(got, PROMPTS[:2], strict=True):
        assert difference(logits, reference(hf_model, prompt)) < 1e-3


def refused(path: Path, dtype: str = "fp32") -> str:
    """Return the message with which a file is refused."""
    with pytest.raises(ModelError) as error:
        load(path, dtype)
    assert "\n" not in error.value.message
    return error.value.message


@pytest.mark.parametrize(
    ("family", "missing", "parameter"),
    [
        ("gemma3", "blk.3.attn_k_norm.weight", "model.layers.3.self_attn.k_norm.weight"),
        ("gemma2", "blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
        ("phi3", "blk.2.attn_qkv.weight", "model.layers.2.self_attn.q_proj.weight"),
        ("qwen3moe", "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"),
        ("gpt-oss", "blk.1.attn_sinks.weight", "model.layers.1.self_attn.sinks"),
        ("gpt-oss", "blk.3.ffn_up_exps.bias", "model.layers.3.mlp.experts.gate_up_proj_bias"),
        ("mixtral", "blk.1.ffn_up_exps.weight", "model.layers.1.block_sparse_moe.experts.0.w3.weight"),
    ],
)
def test_gguf_with_missing_tensors_is_refused(tiny_gguf: TinyGguf, family: str, missing: str, parameter: str) -> None:
    path = edit_gguf(tiny_gguf(family)[0], lambda name: None if name == missing else name)
    assert f"has no tensor for '{parameter}'" in refused(path)


def test_gguf_with_experts_in_tensors_of_their_own_is_refused(tiny_gguf: TinyGguf) -> None:
    edited = edit_gguf(tiny_gguf("qwen3moe")[0], lambda name: name.replace("blk.1.ffn_up_exps", "blk.1.ffn_up.0"))
    assert "has no tensor for 'model.layers.1.mlp.experts.0.up_proj.weight'" in refused(edited)


@pytest.mark.parametrize(
    ("family", "tensor"),
    [("gemma3", "blk.1.attn_q.bias"), ("phi3", "blk.2.attn_qkv.bias"), ("qwen3moe", "blk.3.exp_probs_b.bias")],
)
def test_gguf_with_tensors_that_the_decoder_does_not_have_is_refused(
    tiny_gguf: TinyGguf, family: str, tensor: str
) -> None:
    """Without them, the model would be another one."""
    added = {tensor: np.zeros(64, np.float32)}
    assert repr(tensor) in refused(edit_gguf(tiny_gguf(family)[0], lambda name: name, added))


def edited_matrix(tensor: str, edit: Callable[[np.ndarray], np.ndarray]) -> Quantize:
    return lambda name, data: q8_0(name, np.ascontiguousarray(edit(data)) if name == tensor else data)


def widen(data: np.ndarray) -> np.ndarray:
    """Return as many blocks in wider rows."""
    return data.reshape(*data.shape[:-2], data.shape[-2] // 2, data.shape[-1] * 2)


def one_expert_more(data: np.ndarray) -> np.ndarray:
    return np.concatenate([data, data[:1]])


@pytest.mark.parametrize("dtype", ["fp32", "gguf"])
@pytest.mark.parametrize(
    ("family", "tensor", "edit", "message"),
    [
        ("gemma2", "blk.1.ffn_down.weight", widen, "mlp.down_proj.weight is [32, 192], and its config says [64, 96]"),
        ("phi3", "blk.1.attn_qkv.weight", widen, "qkv_proj.weight is [64, 128], and its config says 128 rows"),
        ("phi3", "blk.1.ffn_up.weight", widen, "gate_up_proj.weight is [96, 128], and its config says 192 rows"),
        ("qwen3moe", UP_EXPERTS, widen, "experts.0.up_proj.weight is [32, 128], and its config says [64, 64]"),
        ("qwen3moe", DOWN_EXPERTS, widen, "experts.0.down_proj.weight is [32, 128], and its config says [64, 64]"),
        ("gpt-oss", DOWN_EXPERTS, widen, "experts.down_proj is [4, 192, 32], and its config says [4, 96, 64]"),
        ("gpt-oss", UP_EXPERTS, widen, "blk.1.ffn_gate_exps.weight and blk.1.ffn_up_exps.weight have different shapes"),
        ("mixtral", DOWN_EXPERTS, lambda data: data[:3], "blk.1.ffn_down_exps.weight has 3 experts"),
        ("mixtral", DOWN_EXPERTS, one_expert_more, "blk.1.ffn_down_exps.weight"),
    ],
)
def test_gguf_with_tensors_of_other_shapes_is_refused(
    tmp_path: Path,
    family: str,
    tensor: str,
    edit: Callable[[np.ndarray], np.ndarray],
    message: str,
    dtype: str,
) -> None:
    path, _ = save_gguf(tmp_path, family, edited_matrix(tensor, edit), **Q8_0_SIZES.get(family, {}))
    assert message in refused(path, dtype)


@pytest.mark.parametrize("dtype", ["fp32", "int8", "gguf"])
@pytest.mark.parametrize(
    ("family", "module", "tensor"),
    [
        ("phi3", "mlp.down_proj.weight", "blk.2.ffn_down.weight"),
        ("phi3", "self_attn.qkv_proj.weight", "blk.2.attn_qkv.weight"),
        ("gpt-oss", "mlp.experts.down_proj", "blk.2.ffn_down_exps.weight"),
        ("gpt-oss", "mlp.experts.gate_up_proj_bias", "blk.2.ffn_gate_exps.bias"),
    ],
)
def test_gguf_with_weights_that_are_not_finite_is_refused(
    tmp_path: Path, family: str, module: str, tensor: str, dtype: str
) -> None:
    model = save(tmp_path, tiny_config(family))
    parameter = model.get_parameter(f"model.layers.2.{module}")
    parameter.data[-1, -1 if "bias" not in module else 0] = float("nan")
    path = write_gguf(tmp_path / "model.gguf", family, model)
    assert f"{tensor} is corrupt: a weight is not a finite number" in refused(path, dtype)


def test_second_scales_of_nvfp4_are_used(tmp_path: Path) -> None:
    path = save_wide_gguf(tmp_path, "qwen3moe", "NVFP4")

    def logits(scale: float) -> torch.Tensor:
        added = {
            "blk.0.ffn_down_exps.scale": np.full(4, scale, np.float32),
            "blk.0.attn_output.scale": np.full(1, scale, np.float32),
            "blk.0.attn_output.input_scale": np.ones(1, np.float32),
        }
        return run(load(edit_gguf(path, lambda name: name, added)), PROMPTS[:1])[0]

    plain = run(load(path), PROMPTS[:1])[0]
    assert torch.equal(logits(1.0), plain)
    assert not torch.equal(logits(2.0), plain)
