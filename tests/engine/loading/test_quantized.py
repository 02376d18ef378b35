"""Quantized folders, packed here by the documented layouts, against the matrices that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from syringa.engine.gpu.packed_weight import PackedWeight
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.model_size import read_size
from syringa.engine.loading.quantized import FP8_DTYPE, QuantizedWeights, quantize_fp8
from syringa.engine.loading.weights import SafetensorsWeights, open_weights
from syringa.engine.models.quantization import read_quantization, stored_dtype
from syringa.engine.processes.eviction import estimate_gpu_memory
from syringa.engine.processes.memory import memory_needs
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import ModelFiles, describe, locate
from syringa.modelfiles.description import count_weights
from tests.engine.loading.quantized_folders import AWQ, FP8, GPTQ, Tensors, compressed, pack, quantize_folder
from tests.engine.models.tiny_models import PROMPTS, SIZES, difference, reference, run, save

OUTPUTS, INPUTS = 48, 128
NAME = "layer.weight"

FP8_BLOCKS = FP8 | {"weight_block_size": [32, 64]}
AWQ_64 = AWQ | {"group_size": 64}
CT_FP8 = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
CT_INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def fp8_folder(kind: str) -> tuple[Tensors, torch.Tensor]:
    data, scale = quantize_fp8(random(OUTPUTS, INPUTS))
    if kind == "tensor":
        scale = torch.tensor(0.02)
    if kind == "block":
        scale = random(2, 2, seed=1).abs()
        expanded = scale.repeat_interleave(32, 0)[:OUTPUTS].repeat_interleave(64, 1)
        return {NAME: data, "layer.weight_scale_inv": scale}, data.float() * expanded
    return {NAME: data, "layer.weight_scale": scale.bfloat16()}, data.float() * scale.bfloat16().float()


def int4_folder(kind: str) -> tuple[Tensors, torch.Tensor]:
    """Return the tensors of a layer, and its matrix."""
    group = 64 if kind == "awq" else 32
    groups = INPUTS // group
    codes, scales = integers(16, OUTPUTS, INPUTS), random(OUTPUTS, groups, seed=2).abs().half() + 0.01
    zeros = integers(15, OUTPUTS, groups, seed=3) + 1
    index = torch.arange(INPUTS) // group
    if kind == "gptq act-order":
        index = index[torch.randperm(INPUTS, generator=torch.Generator().manual_seed(4))]
    if kind in ("compressed symmetric", "compressed without order"):
        zeros = torch.full_like(zeros, 8)
    matrix = (codes - zeros[:, index]).float() * scales.float()[:, index]
    if kind.startswith("compressed"):
        tensors = {"layer.weight_packed": pack(codes), "layer.weight_scale": scales}
        if kind == "compressed":
            tensors["layer.weight_zero_point"] = pack(zeros.T).T
        if kind == "compressed without order":
            tensors["layer.weight_g_idx"] = torch.full((INPUTS,), -1, dtype=torch.int32)
        return tensors, matrix
    if kind == "awq":
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {"qweight": pack(codes.T, order), "qzeros": pack(zeros.T, order), "scales": scales.T}
    else:
        tensors = {"qweight": pack(codes).T, "qzeros": pack(zeros.T - 1), "scales": scales.T, "g_idx": index.int()}
        if kind == "gptq_v2":
            tensors["qzeros"] = pack(zeros.T)
    return {f"layer.{name}": tensor for name, tensor in tensors.items()}, matrix


def open_folder(folder: Path, tensors: Tensors, quantization: dict[str, Any]) -> QuantizedWeights:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    found = read_quantization({"model_type": "llama", "quantization_config": quantization})
    assert found is not None
    return QuantizedWeights(SafetensorsWeights(folder), found)


def set_first(tensors: Tensors, name: str, value: float) -> None:
    tensors[name] = tensors[name].clone(memory_format=torch.contiguous_format)
    tensors[name].view(-1)[0] = value


CASES: dict[str, tuple[Callable[[], tuple[Tensors, torch.Tensor]], dict[str, Any]]] = {
    "fp8 per tensor": (lambda: fp8_folder("tensor"), FP8),
    "fp8 per channel": (lambda: fp8_folder("channel"), CT_FP8),
    "fp8 of fbgemm": (lambda: fp8_folder("channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "fp8 of modelopt": (lambda: fp8_folder("tensor"), {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "fp8 in blocks": (lambda: fp8_folder("block"), FP8_BLOCKS),
    "gptq": (lambda: int4_folder("gptq"), GPTQ),
    "gptq act-order": (lambda: int4_folder("gptq act-order"), GPTQ | {"desc_act": True}),
    "gptq_v2": (lambda: int4_folder("gptq_v2"), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "awq": (lambda: int4_folder("awq"), AWQ_64),
    "compressed": (lambda: int4_folder("compressed"), CT_INT4),
    "compressed symmetric": (lambda: int4_folder("compressed symmetric"), CT_INT4),
    "compressed without order": (lambda: int4_folder("compressed without order"), CT_INT4),
}


@pytest.mark.parametrize("name", CASES)
def test_quantized_weight_is_read_as_its_matrix(tmp_path: Path, name: str) -> None:
    make, quantization = CASES[name]
    tensors, matrix = make()
    weights = open_folder(tmp_path, tensors, quantization)
    assert weights.has(NAME)
    assert weights.shape(NAME) == (OUTPUTS, INPUTS)
    assert torch.equal(weights(NAME), matrix)
    found = weights.quantized(NAME)
    assert found is not None
    assert (found.order is not None) == ("act-order" in name)
    assert found.format == stored_dtype({"quantization_config": quantization})


def test_negative_scales_are_read(tmp_path: Path) -> None:
    """As symmetric quantization writes them if the largest number of a group is positive."""
    tensors, matrix = int4_folder("compressed symmetric")
    tensors["layer.weight_scale"] = -tensors["layer.weight_scale"]
    assert torch.equal(open_folder(tmp_path, tensors, CT_INT4)(NAME), -matrix)


def test_unquantized_weight_of_quantized_folder_stays(tmp_path: Path) -> None:
    """Layers that were left out, and biases."""
    tensors, _ = fp8_folder("channel")
    extra = {"head.weight": random(8, 8).bfloat16(), "layer.bias": random(OUTPUTS)}
    weights = open_folder(tmp_path, tensors | extra, CT_FP8)
    assert weights.quantized("head.weight") is None
    assert torch.equal(weights("head.weight"), extra["head.weight"])
    assert torch.equal(weights("layer.bias"), extra["layer.bias"])


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("fp8 in blocks", lambda t: t.pop("layer.weight_scale_inv"), r"no tensor 'layer.weight_scale'"),
        (
            "fp8 in blocks",
            lambda t: t.update({"layer.weight_scale_inv": torch.ones(3, 2)}),
            r"layer.weight_scale_inv is torch.float32 \[3, 2\], and its config says scales of 48 × 128 weights",
        ),
        ("gptq", lambda t: t.pop("layer.scales"), r"no tensor 'layer.scales'"),
        (
            "gptq",
            lambda t: t.update({"layer.scales": t["layer.scales"][:2]}),
            r"layer.scales is torch.float16 \[2, 48\], and its config says scales of shape \[4, 48\]",
        ),
        (
            "awq",
            lambda t: t.update({"layer.qzeros": t["layer.qzeros"].float()}),
            r"layer.qzeros is torch.float32 \[2, 6\], and its config says torch.int32 of shape \[2, 6\]",
        ),
        (
            "gptq act-order",
            lambda t: t.update({"layer.g_idx": torch.zeros(INPUTS, dtype=torch.int32)}),
            r"layer.g_idx does not have groups of 32 inputs",
        ),
        (
            "fp8 in blocks",
            lambda t: t.update({"layer.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
            r"layer.weight_scale_inv is torch.int32 \[2, 2\], and its config says scales in floating point",
        ),
        (
            "fp8 per tensor",
            lambda t: t.update({NAME: t[NAME].flatten()}),
            rf"{NAME} is \[6144\], and should be a matrix: fetch the model again",
        ),
        (
            "gptq act-order",
            lambda t: t["layer.g_idx"][3:4].fill_(-1),
            r"layer.g_idx does not have groups of 32 inputs",
        ),
        *(
            (name, partial(set_first, name=scales, value=wrong), f"{scales} is corrupt: a scale is not a finite number")
            for name, scales in (
                ("fp8 per tensor", "layer.weight_scale"),
                ("fp8 per channel", "layer.weight_scale"),
                ("fp8 in blocks", "layer.weight_scale_inv"),
                ("gptq", "layer.scales"),
                ("awq", "layer.scales"),
                ("compressed", "layer.weight_scale"),
            )
            for wrong in (float("nan"), float("-inf"))
        ),
    ],
)
def test_incomplete_quantized_weight_is_refused(
    tmp_path: Path, name: str, edit: Callable[[Tensors], object], message: str
) -> None:
    make, quantization = CASES[name]
    tensors, _ = make()
    edit(tensors)
    weights = open_folder(tmp_path, tensors, quantization)
    with pytest.raises(ModelError, match=message):
        weights(NAME)


@pytest.mark.parametrize("shape", [(), (INPUTS * OUTPUTS // 8,), (1, INPUTS // 8, OUTPUTS)])
@pytest.mark.parametrize("name", ["gptq", "awq", "compressed"])
def test_packed_weight_of_another_rank_is_refused(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    make, quantization = CASES[name]
    tensors, _ = make()
    packed = next(each for each in tensors if each.endswith(("qweight", "weight_packed")))
    weights = open_folder(tmp_path, tensors | {packed: torch.ones(shape, dtype=torch.int32)}, quantization)
    for read in (weights.shape, weights, weights.quantized):
        with pytest.raises(ModelError, match=rf"{packed} is \[.*\], and should be a matrix: fetch the model again"):
            read(NAME)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "model.layers.0.mlp.experts.gate_up_proj",
            torch.ones(2, 64, 32).to(FP8_DTYPE),
            "is F8_E4M3, and the experts of a layer in one quantized tensor cannot be read: use a folder with a matrix",
        ),
        (NAME, torch.ones(4, 4).to(torch.float8_e5m2), "is F8_E5M2, which cannot be read as fp8: use the original"),
        ("layer.bias", torch.ones(4, dtype=torch.int8), "is I8, which cannot be read as fp8: use the original folder"),
    ],
)
def test_tensor_that_is_quantized_otherwise_is_refused_by_name(
    tmp_path: Path, name: str, tensor: torch.Tensor, message: str
) -> None:
    weights = open_folder(tmp_path, {name: tensor}, FP8)
    with pytest.raises(ModelError, match=f"{name} {message}"):
        weights(name)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "weights quantized with 'bitsandbytes' cannot be read: FP8, GPTQ and AWQ"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt weights in 'NVFP4' cannot be read"),
        (GPTQ | {"bits": 3}, "GPTQ weights of 3 bits cannot be read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "GPTQ weights in the layout 'marlin' cannot be read"),
        (AWQ | {"version": "gemv"}, "AWQ weights in the layout 'gemv' cannot be read"),
        (GPTQ | {"group_size": "128"}, "group_size is '128', and should be an integer"),
        (FP8 | {"weight_block_size": [100, 128]}, r"FP8 weights in blocks of \[100, 128\] cannot be read"),
        (
            FP8 | {"weight_block_size": [128, 16]},
            "blocks of 128 outputs × 16 inputs cannot be read: blocks of at least 16 × 32 can",
        ),
        *(
            (FP8 | {"fmt": fmt}, f"FP8 weights in the format '{fmt}' cannot be read: FP8, GPTQ and AWQ")
            for fmt in ("e5m2", "e4m3fnuz")
        ),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (
            compressed("int-quantized", num_bits=8, type="int"),
            "compressed-tensors of 8-bit int weights in the format 'int-quantized' cannot be read",
        ),
        (CT_INT4 | {"transform_config": {"R1": {}}}, "compressed-tensors with a transform_config cannot be read"),
        ("fp8", "quantization_config 'fp8' in config.json should be an object"),
        ({"quant_method": "mxfp4"}, "weights quantized with 'mxfp4' cannot be read"),
    ],
)
def test_unreadable_quantization_is_refused_by_name(quantization: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as refused:
        read_quantization({"model_type": "llama", "quantization_config": quantization})
    assert "\n" not in refused.value.message


def test_group_that_the_kernels_do_not_have_is_refused(tmp_path: Path) -> None:
    tensors, _ = int4_folder("gptq")
    weights = open_folder(tmp_path, tensors, GPTQ | {"group_size": 16})
    with pytest.raises(ModelError, match="groups of 16 cannot be read"):
        weights(NAME)


@pytest.fixture(scope="module")
def fp8_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A small model in FP8, and transformers' model with the same weights in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("fp8")
    save(folder, AutoConfig.for_model("qwen3", **(SIZES | {"head_dim": 32})))
    quantize_folder(folder, "fp8 channel")
    weights = open_weights(locate(str(folder)), describe(locate(str(folder))).config)
    config = AutoConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        parameter.data = weights(name).float()
    return folder, model


def test_fp8_folder_on_cpu_is_dequantized(fp8_model: tuple[Path, Any]) -> None:
    folder, model = fp8_model
    loaded = load_model(LoadOptions(str(folder), dtype="fp32", device="cpu", threads=1))
    for logits, prompt in zip(run(loaded, PROMPTS), PROMPTS, strict=True):
        assert difference(logits, reference(model, prompt)) < 1e-3


@pytest.mark.parametrize(("requested", "packed"), [("auto", True), ("fp8", True), ("bf16", False)])
def test_fp8_folder_on_gpu_stays_in_fp8(
    fp8_model: tuple[Path, Any], load_gpu_folder: Callable[..., Any], requested: str, packed: bool
) -> None:
    folder, model = fp8_model
    loaded = load_gpu_folder(folder, dtype=requested)
    assert loaded.info.dtype == ("fp8" if packed else "bf16")
    assert isinstance(loaded.gpu.decoder.layers[0].qkv.weight, PackedWeight) == packed
    for logits, prompt in zip(run(loaded, PROMPTS[:2]), PROMPTS, strict=False):
        assert difference(logits, reference(model, prompt)) < 0.05


def test_fp8_folder_is_refused_where_it_cannot_run(
    monkeypatch: pytest.MonkeyPatch, fp8_model: tuple[Path, Any], load_gpu_folder: Callable[..., Any]
) -> None:
    folder, _ = fp8_model
    with pytest.raises(ConfigError, match="--deterministic on a GPU is for bf16, not for fp8: use --dtype bf16"):
        load_gpu_folder(folder, deterministic=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"weights are in FP8, needs compute capability 8\.9.*use --dtype bf16"):
        load_gpu_folder(folder)
    assert load_gpu_folder(folder, dtype="bf16").info.dtype == "bf16"


def test_count_weights_counts_packed_numbers(tmp_path: Path) -> None:
    tensors, _ = int4_folder("awq")
    open_folder(tmp_path, tensors, AWQ_64)
    scales_and_zeros = 2 * OUTPUTS * 2
    assert count_weights(ModelFiles("m", str(tmp_path), "folder")) == OUTPUTS * INPUTS + scales_and_zeros


def test_memory_needs_of_quantized_folder_on_gpu_are_those_of_its_files(fp8_model: tuple[Path, Any]) -> None:
    folder, _ = fp8_model
    size = read_size(str(folder))
    assert size is not None
    for dtype, weights in (("auto", size.gpu_stored), ("bf16", 2 * size.parameters)):
        needed = memory_needs(WorkerOptions(socket="", model=str(folder), dtype=dtype))["cuda"]
        assert needed == estimate_gpu_memory(weights)
    assert 0 < size.gpu_stored < 2 * size.parameters
