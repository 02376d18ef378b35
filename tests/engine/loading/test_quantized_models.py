"""Quantized folders end to end, dense, sparse and hybrid, against `transformers` with the weights they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from syringa.engine.gpu.decoder import GpuExperts, GpuMlp
from syringa.engine.gpu.packed_weight import PackedWeight
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.model_size import read_model_size
from syringa.engine.models.quantization import stored_dtype
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import describe, locate
from tests.engine.gpu.tiny_models import count_bytes, load_stored_gpu_model
from tests.engine.loading.quantized_folders import LAYOUTS, compressed, edit_config, quantize_folder
from tests.engine.models.hybrid_models import make_config, save_hybrid
from tests.engine.models.native_models import EXPERTS, GEMMA, GLM4_MOE, LOCAL_EXPERTS
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, reference, run, save

SPARSE = {"moe_intermediate_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "phi3": ("phi3", {}),
    "gemma3": GEMMA["gemma3 capped"],
    "qwen3_moe": ("qwen3_moe", EXPERTS | SPARSE | {"mlp_only_layers": [1]}),
    "mixtral": ("mixtral", LOCAL_EXPERTS),
    "glm4_moe": ("glm4_moe", GLM4_MOE | SPARSE),
    "glm4_moe shared": ("glm4_moe", GLM4_MOE | SPARSE | {"n_shared_experts": 2}),
}
HYBRIDS = {
    "qwen3_next": {"moe_intermediate_size": 64, "linear_key_head_dim": 32},
    "qwen3_5": {"linear_key_head_dim": 32},
}
DENSE_CASES = [("llama", "gptq act-order"), ("qwen2", "awq"), ("qwen3", "fp8 blocks"), ("qwen3", "fp8 tensor")]
DENSE_CASES += [("phi3", layout) for layout in ("gptq", "awq", "fp8 blocks", "fp8 channel")]
DENSE_CASES += [("gemma3", "fp8 channel"), ("gemma3", "compressed")]
DENSE_CASES += [("llama", "compressed"), ("qwen3_5", "fp8 blocks"), ("qwen3_next", "gptq")]
SPARSE_CASES = [("qwen3_moe", layout) for layout in ("fp8 blocks", "fp8 tensor", "fp8 channel", "gptq", "compressed")]
SPARSE_CASES += [("mixtral", "awq"), ("glm4_moe", "fp8 blocks"), ("glm4_moe", "compressed")]
CPU_SPARSE_CASES = [*SPARSE_CASES, ("qwen3_moe", "gptq act-order"), ("glm4_moe", "fp8 tensor")]
SPARSE_CASES += [("glm4_moe shared", "fp8 blocks"), ("glm4_moe shared", "gptq"), ("qwen3_next", "fp8 blocks")]


def save_quantized(folder: Path, name: str, layout: str, **options: Any) -> Any:
    """Save a quantized model. Return transformers' model with the weights that it stands for, in fp32."""
    if name in HYBRIDS:
        save_hybrid(folder, make_config(name, **HYBRIDS[name]))
    else:
        family, changes = MODELS[name]
        save(folder, AutoConfig.for_model(family, **(SIZES | changes)))
    plain = folder / "plain"
    quantize_folder(folder, layout, plain, **options)
    return AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", dtype=torch.float32).eval()


def assert_matches(loaded: LoadedModel, model: Any, tolerance: float) -> None:
    prompts = PROMPTS[:2]
    for batch in (run(loaded, prompts), run(loaded, prompts, chunk=15)):
        for logits, prompt in zip(batch, prompts, strict=True):
            assert difference(logits, reference(model, prompt)) < tolerance


@pytest.mark.parametrize(("name", "layout"), DENSE_CASES + SPARSE_CASES)
def test_quantized_folder_matches_dequantized_model(tmp_path: Path, name: str, layout: str) -> None:
    model = save_quantized(tmp_path, name, layout)
    loaded = load_stored_gpu_model(tmp_path)
    assert_matches(loaded, model, 1e-3)
    assert loaded.gpu is not None
    decoder: Any = loaded.gpu.decoder
    for layer in decoder.layers:
        assert isinstance(layer.qkv.weight, PackedWeight)
        assert isinstance(layer.out.weight, PackedWeight)
        experts = layer.mlp
        if isinstance(experts, GpuMlp):
            assert isinstance(experts.gate_up.weight, PackedWeight)
        kept = experts.down if isinstance(experts, GpuExperts) else experts.down.weight
        assert isinstance(kept, PackedWeight)


@pytest.mark.parametrize(("name", "layout"), [*DENSE_CASES, *CPU_SPARSE_CASES, ("qwen3_next", "fp8 blocks")])
def test_quantized_folder_on_cpu_is_dequantized(tmp_path: Path, name: str, layout: str) -> None:
    model = save_quantized(tmp_path, name, layout)
    loaded = load_model(LoadOptions(str(tmp_path), dtype="fp32", device="cpu", threads=1))
    assert_matches(loaded, model, 1e-3)


@pytest.mark.parametrize(
    ("name", "layout", "dtype"),
    [("qwen3_moe", "fp8 blocks", "fp8"), ("mixtral", "awq", "int4"), ("qwen3_5", "fp8 blocks", "fp8")],
)
def test_quantized_folder_on_gpu_stays_as_it_is_stored(
    tmp_path: Path, load_gpu_folder: Callable[..., Any], name: str, layout: str, dtype: str
) -> None:
    model = save_quantized(tmp_path, name, layout)
    loaded, converted = load_gpu_folder(tmp_path), load_gpu_folder(tmp_path, dtype="bf16")
    assert (loaded.info.dtype, converted.info.dtype) == (dtype, "bf16")
    assert isinstance(loaded.gpu.decoder.layers[0].out.weight, PackedWeight)
    assert isinstance(converted.gpu.decoder.layers[0].out.weight, torch.Tensor)
    for each in (loaded, converted):
        if not loaded.gpu.decoder.config.experts:
            assert_matches(each, model, 0.06)
            continue
        # In bf16, a router may choose another expert for some tokens, depending on how products are rounded.
        errors = []
        for logits, prompt in zip(run(each, PROMPTS[:2]), PROMPTS, strict=False):
            expected = reference(model, prompt)
            errors.append((logits - expected).abs().amax(1) / expected.abs().max())
        assert torch.cat(errors).median() < 0.03


GPU_CASES = [("qwen3", layout) for layout in ("fp8 blocks", "fp8 tensor", "fp8 channel", "awq", "compressed")]
GPU_CASES += [("qwen3_moe", "gptq"), ("glm4_moe", "compressed"), ("qwen3_next", "fp8 blocks"), ("qwen3_5", "gptq")]


@pytest.mark.parametrize(("name", "layout"), GPU_CASES)
def test_planned_gpu_memory_is_what_the_weights_take(
    tmp_path: Path, load_gpu_folder: Callable[..., Any], name: str, layout: str
) -> None:
    """Embedding and head are in bf16, and scales may be larger than in the files."""
    save_quantized(tmp_path, name, layout)
    files = locate(str(tmp_path))
    size = read_model_size(files, describe(files))
    # With --dtype fp8, a scale per output is not planned, which is much in layers of 64 inputs.
    for dtype, tolerance in (("auto", 0.03), ("bf16", 0.03), ("fp8", 0.08)):
        found = count_bytes(load_gpu_folder(tmp_path, dtype=dtype).gpu.decoder)
        assert size.gpu_weights(dtype) == pytest.approx(found, rel=tolerance)
    unread = msgspec.structs.replace(size, gpu_stored=0)  # a folder that was not downloaded yet
    assert unread.gpu_weights("auto") == pytest.approx(size.gpu_weights("auto"), rel=0.2)


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("qwen3_moe", "fp8 blocks", "does not support mixture-of-experts models yet: leave it out"),
        ("qwen3_5", "fp8 blocks", "does not support models with linear attention yet: leave it out"),
        ("llama", "gptq", "is for bf16, not for int4: use --dtype bf16"),
    ],
)
def test_deterministic_mode_of_quantized_folder_is_refused_with_advice_that_helps(
    tmp_path: Path, load_gpu_folder: Callable[..., Any], name: str, layout: str, message: str
) -> None:
    save_quantized(tmp_path, name, layout)
    with pytest.raises(ConfigError, match=message):
        load_gpu_folder(tmp_path, deterministic=True)


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next"])
def test_experts_in_act_order_are_planned_and_loaded_in_bf16(
    tmp_path: Path, load_gpu_folder: Callable[..., Any], name: str
) -> None:
    save_quantized(tmp_path, name, "gptq act-order")
    files = locate(str(tmp_path))
    assert read_model_size(files, describe(files)).gpu_dtype == "bf16"
    loaded = load_gpu_folder(tmp_path)
    assert loaded.info.dtype == "bf16"
    assert not isinstance(loaded.gpu.decoder.layers[0].mlp.down, PackedWeight)
    edit_config(tmp_path, quantization_config=LAYOUTS["gptq"])
    with pytest.raises(ModelError, match=r"mlp\.experts\.0 has its inputs in act-order.*use --dtype bf16"):
        load_gpu_folder(tmp_path)
    assert load_gpu_folder(tmp_path, dtype="bf16").info.dtype == "bf16"


@pytest.mark.parametrize(("name", "layout"), [("glm4_moe", "compressed"), ("glm4_moe shared", "fp8 blocks")])
def test_experts_stay_quantized_beside_a_shared_one_that_is_not(tmp_path: Path, name: str, layout: str) -> None:
    model = save_quantized(tmp_path, name, layout, pattern=r"(?<!shared_experts)\.(gate|up|down|q|k|v|o)_proj\.weight$")
    loaded = load_stored_gpu_model(tmp_path)
    assert loaded.gpu is not None
    decoder: Any = loaded.gpu.decoder
    for layer in decoder.layers[1:]:
        assert isinstance(layer.mlp.gate_up, PackedWeight)
        assert isinstance(layer.mlp.down, PackedWeight)
        assert isinstance(layer.mlp.shared_mlp.down.weight, torch.Tensor)
    assert_matches(loaded, model, 1e-3)
    # Steps of few rows without prompts are computed by other operations.
    alone = run(loaded, PROMPTS[:1], chunk=1)[0]
    assert difference(alone, reference(model, PROMPTS[0])) < 1e-3


@pytest.mark.parametrize(("order", "reordered"), [(None, False), ("weight", False), ("group", True), (True, True)])
def test_act_order_of_compressed_tensors_is_read(order: object, reordered: bool) -> None:
    quantization = compressed("pack-quantized", num_bits=4, type="int", group_size=32, actorder=order)
    for kind, dtype in (("llama", "int4"), ("qwen3_moe", "bf16" if reordered else "int4")):
        assert stored_dtype({"model_type": kind, "quantization_config": quantization}) == dtype
