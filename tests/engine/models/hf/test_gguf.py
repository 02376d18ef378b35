"""Models on `transformers`' definitions from GGUF files, compared with `transformers` itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from syringa.modelfiles.gguf_architectures import ARCHITECTURES
from tests.engine.conftest import drive, request
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.gguf_models import FAMILIES, Quantize, q8_0, random_quantization, tiny_config, write_gguf
from tests.engine.models.tiny_models import PROMPTS, difference, reference, run, save
from tests.tiers import slow

MAIN = ["gemma3", "phi3", "qwen3moe", "gpt-oss", "mixtral", "glm4"]  # the others differ from these in data only
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 2}  # whole Q4_K blocks
TinyGguf = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    """`tiny_gguf(family)` returns a GGUF file in F32 and transformers' instance of the model."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            model = save(folder, tiny_config(family))
            made[family] = write_gguf(folder / "model.gguf", family, model), model
        return made[family]

    return get


def load(path: Path, dtype: str = "fp32") -> LoadedModel:
    loaded = load_model(LoadOptions(model=str(path), dtype=dtype, threads=1))
    assert isinstance(loaded.model, HFModel)
    return loaded


def quantized(folder: Path, family: str, quantize: Quantize, **changes: Any) -> tuple[Path, Any]:
    model = save(folder, tiny_config(family, **changes))
    return write_gguf(folder / "quantized.gguf", family, model, quantize), model


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the error of the median row: rounding may route a few tokens to other experts."""
    return float(((got - expected).norm(dim=1) / expected.norm(dim=1)).median())


def test_every_architecture_that_needs_transformers_has_a_tiny_model() -> None:
    assert {name for name, entry in ARCHITECTURES.items() if not entry.native} == FAMILIES.keys() - {"mixtral"}


@pytest.mark.parametrize("family", [*MAIN, *slow(*sorted(FAMILIES.keys() - set(MAIN)))])
def test_gguf_logits_match_transformers(tiny_gguf: TinyGguf, family: str) -> None:
    path, hf_model = tiny_gguf(family)
    for got, prompt in zip(run(load(path), PROMPTS, chunk=20), PROMPTS, strict=True):
        assert difference(got, reference(hf_model, prompt)) < 1e-3


def test_gguf_rope_factors_match_transformers(tmp_path: Path) -> None:
    short, long = [1.0 + i / 8 for i in range(8)], [4.0 + i for i in range(8)]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short, "long_factor": long}
    hf_model = save(tmp_path, tiny_config("phi3", original_max_position_embeddings=32, rope_parameters=rope))
    loaded = load(write_gguf(tmp_path / "model.gguf", "phi3", hf_model))
    for prompt in PROMPTS:  # transformers uses the long factors beyond 32 tokens, this engine for any 256-token context
        assert (difference(run(loaded, [prompt])[0], reference(hf_model, prompt)) < 1e-3) == (len(prompt) > 32)


@pytest.mark.parametrize("family", ["phi3", "qwen3moe", "gpt-oss"])
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


@pytest.mark.parametrize("family", ["gemma3", *slow("phi3", "qwen3moe", "gpt-oss")])
def test_quantized_gguf_is_close_to_original_model(tmp_path: Path, family: str) -> None:
    # Blocks of 32 weights.
    sizes = {"moe_intermediate_size": 64} if family == "qwen3moe" else {}
    path, hf_model = quantized(tmp_path, family, q8_0, **sizes)
    expected = reference(hf_model, PROMPTS[0])
    for dtype, tolerance in (("fp32", 0.03), ("bf16", 0.05), ("int8", 0.1), ("gguf", 0.05)):
        got = run(load(path, dtype), PROMPTS[:1])[0]
        assert relative_error(got, expected) < tolerance, dtype


@pytest.mark.parametrize(
    ("family", "experts"),
    [("gemma3", ""), ("gpt-oss", "MXFP4"), *[pytest.param("qwen3moe", "Q4_K", marks=pytest.mark.slow)]],
)
def test_gguf_blocks_are_close_to_dequantized_weights(tmp_path: Path, family: str, experts: str) -> None:
    sizes = WIDE | ({"moe_intermediate_size": 256} if family == "qwen3moe" else {})
    path, _ = quantized(tmp_path, family, random_quantization("Q4_K", experts), **sizes)
    loaded = load(path, "gguf")
    dequantized = run(load(path), PROMPTS[:1])[0]
    assert relative_error(run(loaded, PROMPTS[:1])[0], dequantized) < 0.03
    if not experts:  # PyTorch's routers may round differently in a batch
        assert torch.equal(run(loaded, PROMPTS[:1])[0], run(loaded, PROMPTS)[0])
    assert isinstance(loaded.model, HFModel)
    linears = [module.linear for module in loaded.model.model.modules() if isinstance(module, HFNativeLinear)]
    assert all(isinstance(linear, BlockLinear) for linear in linears)
    assert len(linears) >= 4 * 2 + 1  # attention, and the output head with the embedding's blocks
    # Nothing is left in full precision but norms, biases and routers.
    assert all(parameter.numel() <= 2048 for parameter in loaded.model.model.parameters())


def test_gguf_dtype_quantizes_tensors_of_other_types_to_int8(tmp_path: Path) -> None:
    path, hf_model = quantized(tmp_path, "gemma3", lambda name, data: (data, gguf.GGMLQuantizationType.F32))
    loaded = load(path, "gguf")
    assert isinstance(loaded.model, HFModel)
    linears = [module.linear for module in loaded.model.model.modules() if isinstance(module, HFNativeLinear)]
    assert all(isinstance(linear, Int8Linear) for linear in linears)
    assert relative_error(run(loaded, PROMPTS[:1])[0], reference(hf_model, PROMPTS[0])) < 0.1


@pytest.mark.parametrize("family", ["qwen3moe", "gpt-oss", "mixtral"])
def test_gguf_experts_on_gpu_decoder_match_transformers(tiny_gguf: TinyGguf, family: str) -> None:
    path, hf_model = tiny_gguf(family)
    got = run(load_tiny_gpu_model(path), PROMPTS[:2])
    for logits, prompt in zip(got, PROMPTS[:2], strict=True):
        assert difference(logits, reference(hf_model, prompt)) < 1e-3


def edit_gguf(path: Path, edit: Callable[[str], str | None]) -> Path:
    """Copy a file with tensors renamed as `edit` says; None leaves one out."""
    reader, target = gguf.GGUFReader(path), path.with_name("edited.gguf")
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            sub_type = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=sub_type)
    for tensor in reader.tensors:
        if (name := edit(tensor.name)) is not None:
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


@pytest.mark.parametrize(
    ("family", "edit", "message"),
    [
        (
            "gemma3",
            lambda name: None if name == "blk.3.attn_k_norm.weight" else name,
            "has no tensor for 'model.layers.3.self_attn.k_norm.weight'",
        ),
        (
            "qwen3moe",
            lambda name: name.replace("blk.1.ffn_up_exps", "blk.1.ffn_up.0"),
            r"Qwen3MoeForCausalLM has no parameter for 'blk.1.ffn_up.0.weight'",
        ),
    ],
)
def test_gguf_with_missing_or_other_tensors_is_refused(
    tiny_gguf: TinyGguf, family: str, edit: Callable[[str], str | None], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        load(edit_gguf(tiny_gguf(family)[0], edit))


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

    path, _ = quantized(tmp_path, "qwen3moe", quantize, moe_intermediate_size=64)
    with pytest.raises(ModelError, match=message):
        load(path, dtype)


def test_gguf_with_weights_that_are_not_finite_is_refused(tmp_path: Path) -> None:
    model = save(tmp_path, tiny_config("phi3"))
    model.model.layers[2].mlp.down_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ModelError, match=r"blk.2.ffn_down.weight is corrupt: a weight is not a finite number"):
        load(write_gguf(tmp_path / "model.gguf", "phi3", model))


def test_gguf_on_transformers_definition_refuses_deterministic_mode(tiny_gguf: TinyGguf) -> None:
    with pytest.raises(ConfigError, match="transformers' definitions"):
        load_model(LoadOptions(model=str(tiny_gguf("phi3")[0]), threads=1, deterministic=True))
