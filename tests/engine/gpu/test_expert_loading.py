"""Checkpoints of mixture-of-experts models: layouts, quantization, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from syringa.engine.cpu.layers.experts import NativeExperts
from syringa.engine.gpu.decoder import GpuDecoder
from syringa.engine.gpu.loading import load_gpu_decoder
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.model_size import read_size
from syringa.engine.loading.quantized import mxfp4_weight, quantize_fp8
from syringa.engine.loading.weights import open_weights
from syringa.engine.models.config import is_native, read_config
from syringa.engine.models.decoder import Decoder
from syringa.engine.models.fused import FusedDecoder
from syringa.engine.models.hf.model import HFModel
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import describe, locate
from tests.engine.gpu.test_decoder import MODELS
from tests.engine.gpu.tiny_models import CPU, count_bytes, load_tiny_gpu_model
from tests.engine.loading.quantized_folders import copy_files, edit_config
from tests.engine.models.gguf_models import relative_error
from tests.engine.models.hybrid_models import make_config, save_hybrid
from tests.engine.models.native_models import GLM4_MOE, GPT_OSS, LOCAL_EXPERTS
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, reference, run, save

EXPERTS, HIDDEN, INTERMEDIATE = GPT_OSS["num_local_experts"], SIZES["hidden_size"], SIZES["intermediate_size"]


def e2m1(bits: int) -> float:
    """Return a number of the format by its definition: sign, two bits of exponent (bias 1), one of mantissa."""
    sign, exponent, mantissa = bits >> 3, (bits >> 1) & 3, bits & 1
    size = 2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2
    return -size if sign else size


def random_mxfp4(outputs: int, inputs: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return blocks and scales of all experts, and the weights `[experts, outputs, inputs]` that they stand for."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (EXPERTS, outputs, inputs // 32, 16, 2), generator=generator)
    scales = torch.randint(121, 126, (EXPERTS, outputs, inputs // 32), generator=generator)
    values = torch.tensor([e2m1(bits) for bits in range(16)])[codes].flatten(3) * 2.0 ** (scales[..., None] - 127)
    blocks = (codes[..., 0] + 16 * codes[..., 1]).to(torch.uint8)
    return blocks, scales.to(torch.uint8), values.flatten(2)


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def load_on_cpu(folder: Path, dtype: str = "fp32", **options: Any) -> LoadedModel:
    loaded = load_model(LoadOptions(str(folder), dtype=dtype, device="cpu", threads=1, **options))
    assert isinstance(loaded.model, Decoder)
    return loaded


def save_mxfp4(folder: Path) -> Any:
    """Save a gpt-oss model whose experts are in MXFP4. Return transformers' model with the same weights in fp32."""
    model = save(folder, AutoConfig.for_model("gpt_oss", **(SIZES | GPT_OSS)))
    tensors = load_file(folder / "model.safetensors")
    for i, layer in enumerate(model.model.layers):
        for name, outputs, inputs in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
            blocks, scales, values = random_mxfp4(outputs, inputs, seed=2 * i + len(name))
            getattr(layer.mlp.experts, name).data = values.transpose(1, 2).contiguous()
            prefix = f"model.layers.{i}.mlp.experts.{name}"
            del tensors[prefix]
            tensors |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    edit_config(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return model


def test_mxfp4_weight_reads_low_bits_first() -> None:
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, 0], blocks[0, 1, 15] = 0x71, 0x9F
    values = mxfp4_weight(blocks, torch.tensor([[127, 130]], dtype=torch.uint8)).dequantize()
    assert values.shape == (1, 64)
    assert values[0, :2].tolist() == [0.5, 6.0]
    assert values[0, 62:].tolist() == [-48.0, -4.0]
    assert not values[0, 2:62].any()


def test_mxfp4_experts_match_dequantized_model(tmp_path: Path) -> None:
    hf_model = save_mxfp4(tmp_path)
    loaded = load_tiny_gpu_model(tmp_path)
    expected = [reference(hf_model, prompt) for prompt in PROMPTS[:2]]
    for batch in (run(loaded, PROMPTS[:2]), run(loaded, PROMPTS[:2], chunk=15)):
        for logits, wanted in zip(batch, expected, strict=True):
            assert difference(logits, wanted) < 1e-3


GATE_UP = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{GATE_UP}_scales"), rf"no tensor for '{GATE_UP}_scales'"),
        (
            lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"][:, :, :1].contiguous()}),
            rf"{GATE_UP}_scales is \[5, 192, 1\], and its config says \[5, 192, 2\]",
        ),
        (lambda t: t.pop("model.layers.0.self_attn.sinks"), r"no tensor for 'model.layers.0.self_attn.sinks'"),
        (
            lambda t: t.update({f"{GATE_UP}_blocks": t[f"{GATE_UP}_blocks"].int()}),
            rf"{GATE_UP}_blocks is torch.int32, and MXFP4 is torch.uint8: fetch the model again",
        ),
        (
            lambda t: t.update({f"{GATE_UP}_scales": t[f"{GATE_UP}_scales"].half()}),
            rf"{GATE_UP}_scales is torch.float16",
        ),
        (
            lambda t: t[f"{GATE_UP}_scales"][0, 0, 0].fill_(255),
            rf"{GATE_UP}_scales is corrupt: a scale is not a number",
        ),
    ],
)
def test_incomplete_mxfp4_folder_is_refused(
    tmp_path: Path, load_gpu_folder: Callable[..., Any], edit: Callable[[Any], object], message: str
) -> None:
    save_mxfp4(tmp_path)
    assert load_gpu_folder(tmp_path).info.dtype == "mxfp4"
    assert load_gpu_folder(tmp_path, dtype="bf16").info.dtype == "bf16"
    edit_tensors(tmp_path, edit)
    with pytest.raises(ModelError, match=message):
        load_gpu_folder(tmp_path)
    with pytest.raises(ModelError, match=message):
        load_on_cpu(tmp_path)


def test_missing_expert_is_refused(tmp_path: Path, load_gpu_folder: Callable[..., Any]) -> None:
    save(tmp_path, AutoConfig.for_model("mixtral", **(SIZES | LOCAL_EXPERTS)))
    name = "model.layers.3.block_sparse_moe.experts.4.w2.weight"
    edit_tensors(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"no tensor for '{name}'"):
        load_gpu_folder(tmp_path)
    with pytest.raises(ModelError, match=f"no tensor for '{name}'"):
        load_on_cpu(tmp_path)


CORRECTION = "model.layers.2.mlp.gate.e_score_correction_bias"
SHARED_UP = "model.layers.1.mlp.shared_experts.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.update({CORRECTION: t[CORRECTION][:3].clone()}), rf"{CORRECTION} is \[3\], and its .* says \[6\]"),
        (lambda t: t.pop(CORRECTION), f"no tensor for '{CORRECTION}': the model is incomplete, fetch it again"),
        (
            lambda t: t.update({SHARED_UP: t[SHARED_UP][:24].clone()}),
            rf"{SHARED_UP} is \[24, 64\], and its config says \[48, 64\]: fetch the model again",
        ),
        (lambda t: t.update({SHARED_UP: t[SHARED_UP][None]}), rf"{SHARED_UP} is \[1, 48, 64\]"),
        (lambda t: t.update({SHARED_UP: t[SHARED_UP].sum()}), rf"{SHARED_UP} is \[\]"),
    ],
)
def test_router_and_shared_experts_of_another_shape_are_refused(
    tmp_path: Path, load_gpu_folder: Callable[..., Any], edit: Callable[[Any], object], message: str
) -> None:
    save(tmp_path, AutoConfig.for_model("glm4_moe", **(SIZES | GLM4_MOE)))
    load_gpu_folder(tmp_path)
    edit_tensors(tmp_path, edit)
    for load in (load_gpu_folder, load_on_cpu):
        with pytest.raises(ModelError, match=message) as refused:
            load(tmp_path)
        assert "\n" not in refused.value.message


def test_deterministic_mode_with_experts_is_refused_by_name(
    tmp_path: Path, load_gpu_folder: Callable[..., Any]
) -> None:
    save(tmp_path, AutoConfig.for_model("gpt_oss", **(SIZES | GPT_OSS)))
    with pytest.raises(ConfigError, match="experts"):
        load_gpu_folder(tmp_path, deterministic=True)


def round_to_fp8(model: Any) -> None:
    """Replace the weights of linear layers and experts by what FP8 with a scale per output stands for."""
    for name, parameter in model.named_parameters():
        if not name.endswith(("_proj", "_proj.weight", "_proj_qkvz.weight", "_proj_ba.weight")):
            continue
        inputs_first = model.config.model_type == "gpt_oss" and parameter.dim() == 3
        data, scale = quantize_fp8(parameter.data.transpose(-1, -2) if inputs_first else parameter.data)
        rounded = data.float() * scale
        parameter.data = rounded.transpose(-1, -2).contiguous() if inputs_first else rounded


def test_planned_gpu_memory_of_mxfp4_is_what_the_weights_take(
    tmp_path: Path, load_gpu_folder: Callable[..., Any]
) -> None:
    save_mxfp4(tmp_path)
    size = read_size(str(tmp_path))
    assert size is not None
    found = count_bytes(load_gpu_folder(tmp_path).gpu.decoder)
    assert size.gpu_weights("auto") == pytest.approx(found, rel=0.05)  # with the experts' biases
    assert msgspec.structs.replace(size, gpu_stored=0).gpu_weights("auto") == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "glm4_moe", "gpt_oss", "gpt_oss in mxfp4", "qwen3_next"])
def test_experts_in_fp8_match_rounded_model(tmp_path: Path, load_gpu_folder: Callable[..., Any], name: str) -> None:
    """With `--dtype fp8`, whatever the folder has them in."""
    if name == "gpt_oss in mxfp4":
        model = save_mxfp4(tmp_path)
    elif name == "qwen3_next":
        model = save_hybrid(tmp_path, make_config(name))
    else:
        family, changes = MODELS[name]
        model = save(tmp_path, AutoConfig.for_model(family, **(SIZES | changes)))
    round_to_fp8(model)
    loaded = load_gpu_folder(tmp_path, dtype="fp8")
    experts = loaded.gpu.decoder.layers[-1].mlp
    assert loaded.info.dtype == experts.gate_up.format == experts.down.format == "fp8"
    assert isinstance(experts.router.weight, torch.Tensor)
    assert all(logits.isfinite().all() for logits in run(loaded, PROMPTS[:1]))
    # Compared with activations in fp32: in bf16, a router may choose another expert.
    exact = load_tiny_gpu_model(tmp_path)
    assert exact.gpu is not None
    description = describe(locate(str(tmp_path)))
    config, weights = read_config(description.config), open_weights(locate(str(tmp_path)), description.config)
    decoder = load_gpu_decoder(config, weights, CPU, description.max_model_len, dtype=torch.float32, fp8=True)
    exact = replace(exact, model=replace(exact.gpu, decoder=decoder))
    for logits, prompt in zip(run(exact, PROMPTS[:2], chunk=15), PROMPTS, strict=False):
        assert difference(logits, reference(model, prompt)) < 1e-3


def save_gpt_oss(folder: Path, stored: str) -> Any:
    """Save a model whose experts are in MXFP4, or all of whose weights are in bf16. Return transformers' in fp32."""
    if stored == "mxfp4":
        return save_mxfp4(folder)
    model = save(folder, AutoConfig.for_model("gpt_oss", **(SIZES | GPT_OSS)))
    for parameter in model.parameters():
        parameter.data = parameter.bfloat16().float()
    edit_tensors(folder, lambda tensors: tensors.update({name: each.bfloat16() for name, each in tensors.items()}))
    return model


# The experts in MXFP4 are larger, and differences grow with them.
@pytest.mark.parametrize(("stored", "tolerance"), [("mxfp4", 0.15), ("bf16", 0.03)])
def test_packed_experts_on_cpu_match_transformers(tmp_path: Path, stored: str, tolerance: float) -> None:
    hf_model = save_gpt_oss(tmp_path, stored)
    expected = [reference(hf_model, prompt) for prompt in PROMPTS]
    loaded = load_on_cpu(tmp_path)
    for batch in (run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=15)):
        for logits, wanted in zip(batch, expected, strict=True):
            assert difference(logits, wanted) < 1e-3
    without_kernels = load_on_cpu(tmp_path, native_kernels=False)
    assert difference(run(without_kernels, PROMPTS[:1])[0], expected[0]) < 1e-3
    quantized = load_on_cpu(tmp_path, "int8")
    assert isinstance(quantized.model, FusedDecoder)
    assert all(isinstance(layer.mlp, NativeExperts) for layer in quantized.model.layers)
    batch = run(quantized, PROMPTS)
    assert relative_error(torch.cat(batch), torch.cat(expected)) < tolerance
    for logits, prompt in zip(batch, PROMPTS, strict=True):
        assert torch.equal(logits, run(quantized, [prompt])[0])


def test_mxfp4_folder_on_cpu_is_the_same_in_int8_as_one_in_bf16(tmp_path: Path) -> None:
    """bf16 has all numbers of MXFP4."""
    hf_model = save_mxfp4(tmp_path)
    plain = tmp_path / "plain"
    hf_model.save_pretrained(plain)
    copy_files([tmp_path / "tokenizer.json"], plain)
    found, expected = (load_on_cpu(folder, "int8") for folder in (tmp_path, plain))
    assert found.info.parameters == expected.info.parameters
    assert found.plan is not None
    assert expected.plan is not None
    assert found.plan.weights == expected.plan.weights
    assert found.plan.model.loading == expected.plan.model.loading == {}  # experts are quantized one by one
    for logits, wanted in zip(run(found, PROMPTS[:2]), run(expected, PROMPTS[:2]), strict=True):
        assert torch.equal(logits, wanted)


def test_moe_families_are_native() -> None:
    for kind in ("qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"):
        assert is_native({"model_type": kind, "hidden_act": "silu"})
        assert not is_native({"model_type": kind, "hidden_act": "gelu"})


def test_experts_in_groups_run_on_transformers_definition(tmp_path: Path, load_gpu_folder: Callable[..., Any]) -> None:
    groups = {"n_group": 2, "topk_group": 1, "n_routed_experts": 6, "num_experts_per_tok": 2}
    hf_model = save(tmp_path, AutoConfig.for_model("glm4_moe", **(SIZES | GLM4_MOE | groups)))
    assert not is_native(describe(locate(str(tmp_path))).config)
    on_cpu = load_model(LoadOptions(str(tmp_path), dtype="fp32", device="cpu", threads=1))
    assert isinstance(on_cpu.model, HFModel)
    for logits, prompt in zip(run(on_cpu, PROMPTS[:2]), PROMPTS, strict=False):
        assert difference(logits, reference(hf_model, prompt)) < 1e-3
    assert not isinstance(load_gpu_folder(tmp_path).gpu.decoder, GpuDecoder)
    edit_config(tmp_path, quantization_config={"quant_method": "fp8"})
    message = r"quantized \(fp8\), which is read for models of the native decoder only: use the original folder, or"
    with pytest.raises(ModelError, match=message):
        load_gpu_folder(tmp_path)


def test_read_config_of_gpt_oss(tmp_path: Path) -> None:
    config = SIZES | GPT_OSS | {"model_type": "gpt_oss"}
    found = read_config(config)
    assert (found.windows, found.sparse, found.mxfp4) == ((12, 0, 12, 0), (True,) * 4, False)
    assert found.qkv_bias
    assert found.out_bias
    with pytest.raises(ModelError, match="quantized with 'awq'"):
        read_config(config | {"quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ModelError, match="experts of 64 × 80 cannot be in MXFP4: groups are of 32"):
        read_config(config | {"intermediate_size": 80, "quantization_config": {"quant_method": "mxfp4"}})
    with pytest.raises(ModelError, match="3 layer_types for 4 layers"):
        read_config(config | {"layer_types": ["full_attention"] * 3})
    with pytest.raises(ModelError, match="6 of 5 experts"):
        read_config(config | {"num_experts_per_tok": 6})
