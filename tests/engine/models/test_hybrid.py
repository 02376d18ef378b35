"""Hybrid models on the native CPU decoder compared with `transformers`, and the delta rule with itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from syringa.engine.cpu.layers.experts import NativeExperts, TorchExperts
from syringa.engine.loading.hybrid_weights import HybridWeights
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.loading.quantized import QuantizedWeight, quantize_fp8
from syringa.engine.loading.weights import SafetensorsWeights
from syringa.engine.models import state_cache
from syringa.engine.models.config import is_native, read_config
from syringa.engine.models.decoder import Decoder
from syringa.engine.models.delta_rule import DeltaInputs, chunk_delta_rule, recurrent_delta_rule
from syringa.errors import ModelError
from syringa.modelfiles import describe, locate
from tests.engine.models.hybrid_models import HYBRIDS, LONG_PROMPTS, make_config, save_hybrid
from tests.engine.models.tiny_models import CountedCalls, difference, reference, run
from tests.tiers import slow


@pytest.fixture(scope="module")
def hybrid_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`hybrid_model(name)` returns the folder of a model and transformers' instance of it."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp("hybrid")
            made[name] = folder, save_hybrid(folder, make_config(name))
        return made[name]

    return get


def load(folder: Path, dtype: str = "fp32", native_kernels: bool = True) -> LoadedModel:
    loaded = load_model(LoadOptions(model=str(folder), dtype=dtype, threads=1, native_kernels=native_kernels))
    assert isinstance(loaded.model, Decoder)
    return loaded


@pytest.mark.parametrize(
    ("name", "kernels"),
    [("qwen3_next", True), ("qwen3_5", False)]
    + [
        pytest.param(name, kernels, marks=pytest.mark.slow)
        for name in HYBRIDS
        for kernels in (True, False)
        if (name, kernels) not in (("qwen3_next", True), ("qwen3_5", False))
    ],
)
def test_hybrid_logits_match_transformers(hybrid_model: Any, name: str, kernels: bool) -> None:
    folder, hf_model = hybrid_model(name)
    loaded = load(folder, native_kernels=kernels)
    expected = [reference(hf_model, prompt) for prompt in LONG_PROMPTS]
    for prompts, chunk in ((LONG_PROMPTS, 0), (LONG_PROMPTS, 13), (LONG_PROMPTS[:2], 1)):
        for got, wanted in zip(run(loaded, prompts, chunk), expected, strict=False):
            assert difference(got, wanted) < 1e-3


def test_only_experts_of_a_step_are_computed(hybrid_model: Any) -> None:
    loaded: Any = load(hybrid_model("qwen3_next")[0])
    weights = [layer.mlp.weights for layer in loaded.model.layers if isinstance(layer.mlp, TorchExperts)]
    for each in weights:
        each.experts = [(CountedCalls(gate_up), CountedCalls(down)) for gate_up, down in each.experts]
    run(loaded, [[7]])
    assert weights
    for each in weights:  # two of six are chosen for a token
        for projections in zip(*each.experts, strict=True):
            assert sorted(layer.calls for layer in projections) == [0, 0, 0, 0, 1, 1]


def test_only_experts_of_a_step_are_read_by_the_kernels(hybrid_model: Any) -> None:
    loaded: Any = load(hybrid_model("qwen3_next")[0], "int8")
    layers = [layer.mlp for layer in loaded.model.layers if isinstance(layer.mlp, NativeExperts)]
    expected = run(loaded, [[7]])[0]
    assert layers
    for experts in layers:
        unused = []
        for expert in range(6):
            address = experts.pointers.gate_up[expert]
            # Another expert's weights change the result, if they are read.
            experts.pointers.gate_up[expert] = experts.pointers.gate_up[(expert + 1) % 6]
            unused.append(torch.equal(run(loaded, [[7]])[0], expected))
            experts.pointers.gate_up[expert] = address
        assert sum(unused) == 4  # two of six are chosen for a token


@pytest.mark.parametrize("name", ["qwen3_next", *slow("qwen3_5")])
def test_hybrid_bf16_and_int8_are_accurate_and_batch_invariant(hybrid_model: Any, name: str) -> None:
    folder, hf_model = hybrid_model(name)
    prompt = LONG_PROMPTS[-1]
    expected = reference(hf_model, prompt)
    for dtype, tolerance in (("bf16", 0.05), ("int8", 0.12)):
        loaded = load(folder, dtype)
        alone = run(loaded, [prompt])[0]
        errors = (alone - expected).norm(dim=1) / expected.norm(dim=1)
        # Rounding changes the choice between experts that are nearly tied, for a few tokens.
        assert float(errors.median()) < tolerance, dtype
        assert torch.equal(alone, run(loaded, LONG_PROMPTS)[-1]), dtype
        assert torch.equal(alone, run(loaded, LONG_PROMPTS, chunk=13)[-1]), dtype
        assert torch.equal(alone[:70], run(loaded, [prompt[:70]], chunk=1)[0]), dtype
        for rows in ([3, len(prompt) - 1], []):  # the last layer's output is computed for them only
            assert torch.equal(run(loaded, [prompt], rows=rows)[0], alone[rows]), dtype


def test_hybrid_language_model_is_read_from_folder_with_vision_tower(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = make_config("qwen3_5").to_dict() | {"tie_word_embeddings": False}
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64,
        "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=3, video_token_id=4)
    hf_model = save_hybrid(tmp_path, config, Qwen3_5ForConditionalGeneration)
    loaded = load(tmp_path)
    for prompt in LONG_PROMPTS[::2]:
        assert difference(run(loaded, [prompt])[0], reference(hf_model, prompt)) < 1e-3
    description = describe(locate(str(tmp_path)))
    assert is_native(description.config)
    assert not description.supports_images
    assert loaded.info.architecture == "Qwen3_5ForConditionalGeneration"


def test_experts_in_one_tensor_are_read_as_separate_ones(hybrid_model: Any, tmp_path: Path) -> None:
    """Whichever layout transformers has written, the other one is read, too."""
    from safetensors.torch import load_file, save_file

    folder, hf_model = hybrid_model("qwen3_5_moe")
    tensors = load_file(folder / "model.safetensors")
    layers, experts = 4, 6
    packed = "model.layers.0.mlp.experts.gate_up_proj" in tensors
    for i in range(layers):
        prefix = f"model.layers.{i}.mlp.experts."
        if packed:
            gate_up, down = tensors.pop(f"{prefix}gate_up_proj"), tensors.pop(f"{prefix}down_proj")
            for e in range(experts):
                gate, up = gate_up[e].chunk(2)
                tensors |= {
                    f"{prefix}{e}.gate_proj.weight": gate.contiguous(),
                    f"{prefix}{e}.up_proj.weight": up.contiguous(),
                    f"{prefix}{e}.down_proj.weight": down[e].contiguous(),
                }
        else:
            parts = {
                name: torch.stack([tensors.pop(f"{prefix}{e}.{name}_proj.weight") for e in range(experts)])
                for name in ("gate", "up", "down")
            }
            tensors[f"{prefix}gate_up_proj"] = torch.cat([parts["gate"], parts["up"]], dim=1)
            tensors[f"{prefix}down_proj"] = parts["down"]
    save_file(tensors, tmp_path / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    got = run(load(tmp_path), LONG_PROMPTS[:1])[0]
    assert difference(got, reference(hf_model, LONG_PROMPTS[0])) < 1e-3


def test_quantized_rows_are_those_of_the_dequantized_matrix(hybrid_model: Any) -> None:
    folder, _ = hybrid_model("qwen3_next")
    config = read_config(json.loads((folder / "config.json").read_text()))

    class Fp8Folder(SafetensorsWeights):
        def quantized(self, name: str, device: torch.device) -> QuantizedWeight:
            data, scales = quantize_fp8(self.read(name))
            return QuantizedWeight("fp8", data, scales, data.shape[1])

    weights = HybridWeights(Fp8Folder(folder), config)
    cpu = torch.device("cpu")
    for name in ("linear_attn.qkv_proj", "linear_attn.z_proj", "linear_attn.a_proj", "linear_attn.out_proj"):
        found = weights.quantized(f"model.layers.0.{name}.weight", cpu)
        assert found is not None
        torch.testing.assert_close(found.dequantize(), weights(f"model.layers.0.{name}.weight"), rtol=0.07, atol=0.01)
    gates = weights.quantized("model.layers.2.self_attn.g_proj.weight", cpu)
    assert gates is not None
    torch.testing.assert_close(
        gates.dequantize(), weights("model.layers.2.self_attn.g_proj.weight"), rtol=0.07, atol=0.01
    )


@pytest.mark.parametrize("at_once", [0, 1 << 20])
def test_state_copies_read_all_sources_before_they_write(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(state_cache, "MAX_COPY_BYTES", at_once)
    shape = read_config(make_config("qwen3_5").to_dict()).delta_net
    assert shape is not None
    states = state_cache.StateShape(3, shape, torch.device("cpu")).allocate(4)
    before = []
    for tensor in (states.conv, states.recurrent):
        tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
        before.append(tensor.clone())
    states.copy([(0, 1), (1, 2), (2, 0)])
    for tensor, old in zip((states.conv, states.recurrent), before, strict=True):
        assert torch.equal(tensor, old[:, [2, 0, 1, 3]])


def test_delta_rule_in_chunks_equals_recurrence() -> None:
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = random(50, 3, 8), random(50, 3, 8), random(50, 3, 12)
    k[10:40] = k[10]  # equal keys: the system of a chunk is as far from the identity as it can be
    k = k / k.norm(dim=-1, keepdim=True)
    decay = -torch.rand(50, 3, generator=generator, dtype=torch.float64) * torch.tensor([0.001, 0.5, 30.0])
    inputs = DeltaInputs(q, k, v, decay, random(50, 3).sigmoid())
    state = random(3, 8, 12)
    expected, last = recurrent_delta_rule(inputs, state)
    got, after = chunk_delta_rule(inputs, state)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(after, last, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "4 linear value heads cannot share 3 key heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"linear_key_head_dim": "x"}, "linear_key_head_dim is 'x'"),
        ({"layer_types": ["linear_attention"] * 4}, "all layers are of type 'linear_attention'"),
        ({"layer_types": ["mamba", "full_attention"] * 2}, "layers of type 'mamba' are not supported"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "2 layer_types for 4 layers"),
        ({"shared_expert_intermediate_size": -1}, "shared_expert_intermediate_size is -1"),
    ],
)
def test_read_config_refuses_impossible_hybrids(changes: dict[str, Any], message: str) -> None:
    config = make_config("qwen3_next").to_dict() | changes
    with pytest.raises(ModelError, match=message) as found:
        read_config(config)
    assert "\n" not in found.value.message


def test_check_shapes_refuses_delta_net_of_another_size(hybrid_model: Any, tmp_path: Path) -> None:
    folder, _ = hybrid_model("qwen3_next")
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"linear_value_head_dim": 64}))
    with pytest.raises(ModelError, match=r"in_proj_qkvz.weight is \[320, 64\], and its config says 576 rows"):
        load(tmp_path)
