"""Qwen3.5 from GGUF files, converted as llama.cpp's converter does it, compared with `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from syringa.engine.cpu.layers.linear import BlockLinear, JoinedLinear
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.layers import GatedDeltaNet
from syringa.errors import ModelError
from syringa.modelfiles import read_gguf
from tests.engine.gpu.tiny_models import load_tiny_gpu_model
from tests.engine.models.gguf_models import Quantize, q8_0
from tests.engine.models.hybrid_models import LONG_PROMPTS, make_config, save_hybrid
from tests.engine.models.tiny_models import difference, reference, run

FAMILIES = {"qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe"}
WIDE = {"hidden_size": 64, "linear_key_head_dim": 32, "num_hidden_layers": 4, "moe_intermediate_size": 64}


def tile(tensor: torch.Tensor, config: Any, size: int, dim: int = 0) -> torch.Tensor:
    """Reorder value heads of `size` rows each: the first of every key head, then the second ones."""
    keys = config.linear_num_key_heads
    parts = tensor.movedim(dim, 0)
    tiled = parts.reshape(keys, -1, size, *parts.shape[1:]).transpose(0, 1).reshape(parts.shape)
    return tiled.movedim(0, dim)


def convert(name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    """Return a parameter of transformers' definition as it is in a GGUF file, by the name that `gguf`'s map knows."""
    width, size = 2 * config.linear_num_key_heads * config.linear_key_head_dim, config.linear_value_head_dim
    kind = name.rpartition("linear_attn.")[2]
    if "linear_attn." not in name:
        if name.endswith("norm.weight"):
            tensor = tensor + 1
        return name, tensor.squeeze() if name.endswith("shared_expert_gate.weight") else tensor
    if kind in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = tensor.squeeze(1) if kind == "conv1d.weight" else tensor
        tensor = torch.cat([tensor[:width], tile(tensor[width:], config, size)])
    elif kind == "in_proj_z.weight":
        tensor = tile(tensor, config, size)
    elif kind in ("in_proj_b.weight", "in_proj_a.weight", "dt_bias", "A_log"):
        tensor = tile(-tensor.exp() if kind == "A_log" else tensor, config, 1)
    elif kind == "out_proj.weight":
        tensor = tile(tensor, config, size, dim=1)
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def write_gguf(path: Path, name: str, model: Any, quantize: Quantize | None = None, *, extra_layers: int = 0) -> Path:
    config, architecture = model.config, FAMILIES[name]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers + extra_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_full_attention_interval(4)
    if extra_layers:
        writer.add_nextn_predict_layers(extra_layers)
    if name == "qwen3_5_moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    by_name = {text: each for each, text in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(by_name[architecture], config.num_hidden_layers)
    state = dict(model.state_dict())
    for parameter in list(state):
        if parameter.endswith("experts.gate_up_proj"):
            gate, up = state.pop(parameter).chunk(2, dim=1)
            prefix = parameter.removesuffix("gate_up_proj")
            state |= {f"{prefix}gate_proj.weight": gate, f"{prefix}up_proj.weight": up}
        elif parameter.endswith("experts.down_proj"):
            state[f"{parameter}.weight"] = state.pop(parameter)
    for parameter, value in state.items():
        if parameter == "lm_head.weight" and config.tie_word_embeddings:
            continue
        converted, tensor = convert(parameter, value, config)
        stored = names.get_name(converted, try_suffixes=(".weight", ".bias"))
        assert stored, converted
        data, kind = np.ascontiguousarray(tensor.float().numpy()), GGMLQuantizationType.F32
        plain = ("conv1d", "ffn_gate_inp", "ssm_beta", "ssm_alpha")
        if quantize is not None and data.ndim > 1 and not any(each in stored for each in plain):
            data, kind = quantize(stored, data)
        writer.add_tensor(stored, data, raw_dtype=kind)
    if extra_layers:
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.enorm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save(folder: Path, name: str, **changes: Any) -> Any:
    layers = {"layer_types": [*["linear_attention"] * 3, "full_attention"]}  # as GGUF files have it
    return save_hybrid(folder, make_config(name, **(layers | changes)))


def load(path: Path, dtype: str = "fp32", **options: Any) -> LoadedModel:
    return load_model(LoadOptions(model=str(path), dtype=dtype, threads=1, **options))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("value_heads", [2, 6])  # of two key heads
def test_hybrid_gguf_logits_match_transformers(tmp_path: Path, name: str, value_heads: int) -> None:
    hf_model = save(tmp_path, name, linear_num_value_heads=value_heads)
    path = write_gguf(tmp_path / "m.gguf", name, hf_model)
    on_cpu, without_kernels = load(path), load(path, native_kernels=False)
    on_gpu = load_tiny_gpu_model(path)
    for loaded in (on_cpu, without_kernels, on_gpu):
        for got, prompt in zip(run(loaded, LONG_PROMPTS, chunk=64), LONG_PROMPTS, strict=True):
            assert difference(got, reference(hf_model, prompt)) < 1e-3


@pytest.mark.parametrize("name", FAMILIES)
def test_quantized_hybrid_gguf_stays_in_blocks(tmp_path: Path, name: str) -> None:
    hf_model = save(tmp_path, name, **WIDE)
    path = write_gguf(tmp_path / "m.gguf", name, hf_model, q8_0)
    expected = run(load(path), LONG_PROMPTS)
    for dtype, tolerance in (("gguf", 0.12), ("int8", 0.2)):
        loaded: Any = load(path, dtype)
        alone = run(loaded, LONG_PROMPTS[-1:])[0]
        errors = (alone - expected[-1]).norm(dim=1) / expected[-1].norm(dim=1)
        assert float(errors.median()) < tolerance, dtype
        assert torch.equal(alone, run(loaded, LONG_PROMPTS)[-1]), dtype
    nets = [layer.mixer for layer in load_layers(path) if isinstance(layer.mixer, GatedDeltaNet)]
    assert len(nets) == 3
    for net in nets:  # b and a are in fp32 in the file
        assert isinstance(net.project, JoinedLinear)
        assert [isinstance(each, BlockLinear) for each in net.project.layers] == [True, True, False, False]
        assert isinstance(net.out.linear, BlockLinear)


def test_rates_that_are_not_negative_are_refused(tmp_path: Path) -> None:
    hf_model = save(tmp_path, "qwen3_5")
    path = write_gguf(tmp_path / "m.gguf", "qwen3_5", hf_model)
    with path.open("r+b") as file:
        file.seek(read_gguf(str(path)).tensors["blk.1.ssm_a"].offset)
        file.write(np.float32(0.5).tobytes())
    with pytest.raises(ModelError, match=r"blk\.1\.ssm_a is corrupt: a rate is not negative"):
        load(path)


def load_layers(path: Path) -> list[Any]:
    loaded: Any = load(path, "gguf")
    return list(loaded.model.layers)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path: Path) -> None:
    hf_model = save(tmp_path, "qwen3_5")
    path = write_gguf(tmp_path / "m.gguf", "qwen3_5", hf_model, extra_layers=1)
    assert difference(run(load(path), LONG_PROMPTS[:1])[0], reference(hf_model, LONG_PROMPTS[0])) < 1e-3


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("ssm.inner_size", r"qwen35\.ssm\.inner_size is 130; convert"),
        ("ssm.time_step_rank", r"is \[|has \d+ rows, and its config says"),
        ("ssm.conv_kernel", r"conv1d\.weight is"),
        ("nextn_predict_layers", r"qwen35\.nextn_predict_layers is"),
    ],
)
def test_hybrid_gguf_with_other_sizes_is_refused(tmp_path: Path, key: str, message: str) -> None:
    hf_model = save(tmp_path, "qwen3_5")
    path = write_gguf(tmp_path / "m.gguf", "qwen3_5", hf_model, extra_layers=1)
    metadata = read_gguf(str(path)).metadata
    old = int(metadata[f"qwen35.{key}"]).to_bytes(4, "little")
    new = {"ssm.inner_size": 130, "ssm.time_step_rank": 8, "ssm.conv_kernel": 5, "nextn_predict_layers": 5}[key]
    data, name = path.read_bytes(), f"qwen35.{key}".encode()
    at = data.index(name) + len(name) + 4  # after the type of the value
    assert data[at : at + 4] == old
    path.write_bytes(data[:at] + new.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(ModelError, match=message) as refused:
        load(path)
    assert "\n" not in str(refused.value)
