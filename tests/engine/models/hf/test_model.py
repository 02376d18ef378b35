"""Models on `transformers`' definitions compared with `transformers` itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from syringa.engine.cpu.layers.native_ops import attend
from syringa.engine.cpu.native import AttentionShape, Kernels
from syringa.engine.loading.loaded_model import LoadedModel, LoadOptions
from syringa.engine.loading.loader import load_model
from syringa.engine.models.hf import attention as hf_attention
from syringa.engine.models.hf.model import HFModel
from syringa.engine.scheduling.limits import SchedulerLimits
from syringa.engine.worker.core import EngineCore
from syringa.errors import ModelError
from tests.engine.conftest import drive, request
from tests.engine.models.tiny_models import (
    PROMPTS,
    SIZES,
    CountedCalls,
    difference,
    reference,
    run,
    save,
    save_tokenizer,
)

EXPERTS = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 24}
FULL, SLIDING = "full_attention", "sliding_attention"
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "vaultgemma": {  # soft caps
        "head_dim": 16,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 20,
        "layer_types": [SLIDING, FULL] * 2,
    },
    "olmo3": {"sliding_window": 12, "layer_types": [SLIDING, FULL] * 2},  # rotary embedding by layer type
    "gemma4_text": {  # layer types with different head sizes
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 12,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 160,
        "num_kv_shared_layers": 0,
        "layer_types": [SLIDING, FULL] * 2,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "glm4": {"head_dim": 32, "attention_bias": True},  # gate and up are one matrix
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 80},
    "granitemoe": LOCAL_EXPERTS,
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1},  # experts as inputs × outputs
    "granite_swa": {"head_dim": 16, "sliding_window": 12, "attention_multiplier": 0.3},  # sinks
    "granitemoe_swa": LOCAL_EXPERTS | {"head_dim": 16, "sliding_window": 12, "attention_multiplier": 0.3},
    "deepseek_v3": EXPERTS
    | LATENT  # keys longer than values
    | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dbrx": {  # its forward pass needs weights
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "starcoder2": {"sliding_window": 12},
    "gpt_neox": {},
    "olmo2": {},
    "granite": {"logits_scaling": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2},
    "cohere2": {"logit_scale": 0.3, "sliding_window": 12, "layer_types": [SLIDING, FULL] * 2},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
}


def config_of(family: str, **changes: Any) -> Any:
    return AutoConfig.for_model(family, **(SIZES | FAMILIES.get(family, {}) | changes))


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`tiny_model(family)` returns the folder of a model and transformers' instance of it."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(family: str) -> tuple[Path, Any]:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = folder, save(folder, config_of(family))
        return made[family]

    return get


def load(folder: Path, dtype: str = "fp32", **options: Any) -> LoadedModel:
    loaded = load_model(LoadOptions(model=str(folder), dtype=dtype, threads=1, **options))
    assert isinstance(loaded.model, HFModel)
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_hf_model_logits_match_transformers(tiny_model: Any, family: str) -> None:
    folder, hf_model = tiny_model(family)
    loaded = load(folder)
    expected = [reference(hf_model, prompt) for prompt in PROMPTS]
    alone = [run(loaded, [prompt])[0] for prompt in PROMPTS]
    for batch in (alone, run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=13)):
        for got, wanted in zip(batch, expected, strict=True):
            assert difference(got, wanted) < 1e-3
    decoded = run(loaded, PROMPTS[:2], chunk=1)
    torch.testing.assert_close(decoded[0], alone[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["vaultgemma", "granite_swa", "olmo3", "qwen2_moe", "phi"])
def test_hf_model_without_kernels_matches_transformers(tiny_model: Any, family: str) -> None:
    folder, hf_model = tiny_model(family)
    loaded = load(folder, native_kernels=False)
    got = run(loaded, PROMPTS, chunk=20)
    assert all(difference(x, reference(hf_model, prompt)) < 1e-3 for x, prompt in zip(got, PROMPTS, strict=True))


@pytest.mark.parametrize("family", ["vaultgemma", "granitemoe_swa", "qwen2_moe", "gpt2", "cohere2"])
def test_hf_model_greedy_tokens_match_transformers(tiny_model: Any, family: str) -> None:
    folder, hf_model = tiny_model(family)
    core = EngineCore(load(folder), kv_cache_tokens=1024)
    prompts = {str(i): prompt for i, prompt in enumerate(PROMPTS)}
    stopping = {"ignore_eos": True}
    answers = drive(
        core, [request(i, p, max_tokens=12, temperature=0.0, stopping=stopping) for i, p in prompts.items()]
    )
    core.close()
    for i, prompt in prompts.items():
        output = hf_model.generate(
            torch.tensor([prompt]), do_sample=False, min_new_tokens=12, max_new_tokens=12, suppress_tokens=None
        )[0, len(prompt) :].tolist()
        tokens = answers[i, 0].tokens
        assert len(tokens) == 12
        # transformers suppresses the end token up to `min_new_tokens`: compare up to the one this engine sampled.
        same = tokens.index(2) if 2 in tokens else 12
        assert tokens[:same] == output[:same]


def test_only_experts_of_a_step_are_computed_in_int8(tiny_model: Any) -> None:
    loaded: Any = load(tiny_model("olmoe")[0], "int8")
    layers = [layer.mlp.experts.native_experts for layer in loaded.model.model.model.layers]
    counters = []
    for experts in layers:
        for projections in experts:
            projections[:] = [CountedCalls(each) for each in projections]
            counters.append(projections)
    run(loaded, [[7]])
    # Two of four are chosen for a token.
    assert [sorted(each.calls for each in projections) for projections in counters] == [[0, 0, 1, 1]] * 2 * len(layers)


@pytest.mark.parametrize(
    "family", ["vaultgemma", "olmo3", "granitemoe", "granitemoe_swa", "aria_text", "deepseek_v3", "gpt2", "phi"]
)
@pytest.mark.parametrize("dtype", ["int8", "bf16"])
def test_hf_model_bf16_and_int8_are_batch_invariant(tiny_model: Any, family: str, dtype: str) -> None:
    loaded = load(tiny_model(family)[0], dtype)
    alone = [run(loaded, [prompt])[0] for prompt in PROMPTS]
    together, chunked = run(loaded, PROMPTS), run(loaded, PROMPTS, chunk=13)
    for one, other, pieces in zip(alone, together, chunked, strict=True):
        # PyTorch's sigmoid, in DeepSeek's router, rounds the last numbers of a tensor differently.
        assert torch.equal(one, other) or (family == "deepseek_v3" and difference(one, other) < 0.05)
        # Attention outside the kernels (keys longer than values) is not bit-exact across chunk sizes.
        assert torch.equal(one, pieces) or family == "deepseek_v3"


@pytest.mark.parametrize("family", ["vaultgemma", "granite_swa", "glm4", "gpt2", "olmo2"])
def test_hf_model_bf16_and_int8_are_close_to_fp32(tiny_model: Any, family: str) -> None:
    folder, hf_model = tiny_model(family)
    expected = reference(hf_model, PROMPTS[0])
    for dtype, tolerance in (("bf16", 0.03), ("int8", 0.08)):
        error = run(load(folder, dtype), PROMPTS[:1])[0] - expected
        assert float(error.norm() / expected.norm()) < tolerance, dtype


@pytest.mark.parametrize("family", ["olmoe", "aria_text"])
def test_hf_model_experts_are_quantized_to_int8(tiny_model: Any, family: str) -> None:
    folder, hf_model = tiny_model(family)
    loaded = load(folder, "int8")
    assert isinstance(loaded.model, HFModel)
    hf_model.set_experts_implementation("eager")
    name = next(name for name, _ in hf_model.named_modules() if name.endswith("experts"))
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(9, 64, generator=generator)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    weights = torch.rand(9, 2, generator=generator)
    with torch.inference_mode():
        expected = hf_model.get_submodule(name)(hidden, chosen, weights)
        got = loaded.model.model.get_submodule(name)(hidden, chosen, weights)
    assert float((got - expected).norm() / expected.norm()) < 0.02
    assert not any(parameter.dim() == 3 for parameter in loaded.model.model.parameters())


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_hf_model_output_does_not_depend_on_token_budget(tiny_model: Any, dtype: str) -> None:
    loaded = load(tiny_model("starcoder2")[0], dtype)
    answers = []
    for budget in (512, 8):  # with 8 tokens per step, most steps need no logits
        core = EngineCore(loaded, SchedulerLimits(step_tokens=budget), kv_cache_tokens=512)
        requests = [request(str(i), prompt, temperature=0.0) for i, prompt in enumerate(PROMPTS)]
        answers.append({key: answer.tokens for key, answer in drive(core, requests).items()})
        core.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"family": "olmo2", "rope_parameters": LONGROPE},
        {
            "family": "olmo3",
            "rope_parameters": {FULL: LONGROPE, SLIDING: {"rope_type": "default", "rope_theta": 10000.0}},
        },
    ],
    ids=["all layers", "by layer type"],
)
def test_dynamic_rope_does_not_depend_on_batch(tmp_path: Path, changes: dict[str, Any]) -> None:
    hf_model = save(tmp_path, config_of(**changes))
    loaded = load(tmp_path)
    for prompt in PROMPTS:  # transformers uses the long factors beyond 32 tokens, this engine for any 256-token context
        got = run(loaded, [prompt], chunk=16)[0]
        assert (difference(got, reference(hf_model, prompt)) < 1e-3) == (len(prompt) > 32)
    within = load(tmp_path, max_model_len=32)
    assert difference(run(within, [PROMPTS[1]])[0], reference(hf_model, PROMPTS[1])) < 1e-3


@pytest.mark.parametrize("family", ["vaultgemma", "granite_swa"])
def test_attention_with_soft_caps_and_sinks_runs_in_the_compiled_kernel(
    tiny_model: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    folder, hf_model = tiny_model(family)
    loaded = load(folder)
    assert loaded.kernels is not None
    calls: list[AttentionShape] = []

    def watched(kernels: Kernels, shape: AttentionShape, *arguments: Any) -> None:
        calls.append(shape)
        attend(kernels, shape, *arguments)

    monkeypatch.setattr(hf_attention, "attend", watched)
    monkeypatch.setattr(hf_attention, "paged_attention", None)  # in PyTorch
    for got, prompt in zip(run(loaded, PROMPTS, chunk=13), PROMPTS, strict=True):
        assert difference(got, reference(hf_model, prompt)) < 1e-3
    assert all(bool(shape.sinks) == (family == "granite_swa") for shape in calls)
    assert all(bool(shape.softcap) == (family == "vaultgemma") for shape in calls)


REFUSED = {
    "t5": ({"d_model": 64}, "encoder-decoder"),
    "mamba": ({}, "linear_attention|state-space"),
    "rwkv": ({}, "state-space"),
    "jamba": ({}, "linear_attention|mamba"),
    "recurrent_gemma": ({}, "recurrent"),
    "lfm2": ({"num_hidden_layers": 4, "layer_types": ["conv", FULL] * 2}, "conv"),
    "llama4_text": ({}, "chunked_attention"),
    "deepseek_v32": ({}, "indexed_attention"),
    "bloom": ({}, "ALiBi"),
    "mpt": ({}, "ALiBi"),
    "falcon": ({"alibi": True}, "ALiBi"),
    "gptj": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}, "attention interface"),
    "bert": ({}, "attention is not causal"),
}


def save_config(folder: Path, config: dict[str, Any]) -> None:
    """Save a folder with unreadable weights, to test that refusals come before they are read."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"no weights")
    save_tokenizer(folder)


@pytest.mark.parametrize("family", REFUSED)
def test_loader_refuses_unsupported_architectures_before_reading_weights(tmp_path: Path, family: str) -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    changes, reason = REFUSED[family]
    name = (MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)[family]
    save_config(tmp_path, AutoConfig.for_model(family, **changes).to_dict() | {"architectures": [name]})
    with pytest.raises(ModelError, match=f"^{name} cannot be run: .*({reason})"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vision_config": {"hidden_size": 8}}, "read images"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized"),
        ({"model_type": "unheard_of"}, "does not know its type, 'unheard_of'"),
        ({"architectures": ["Starcoder2ForSequenceClassification"]}, "only Starcoder2ForCausalLM generates text"),
        ({"auto_map": {"AutoConfig": "evil.Evil"}, "model_type": "evil"}, "does not know its type, 'evil'"),
    ],
)
def test_loader_refuses_unsupported_configs(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    config = config_of("starcoder2").to_dict() | {"architectures": ["Starcoder2ForCausalLM"]}
    save_config(tmp_path, config | changes)
    with pytest.raises(ModelError, match=reason):
        load(tmp_path)


def test_loader_refuses_missing_and_broken_weights(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path, config_of("granite"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"no tensor for 'model.layers.2.mlp.up_proj.weight'"):
        load(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load(tmp_path)


def test_loader_checks_memory_before_reading_weights(tmp_path: Path) -> None:
    config = config_of("starcoder2", hidden_size=65536, intermediate_size=262144, num_hidden_layers=80)
    save_config(tmp_path, config.to_dict() | {"architectures": ["Starcoder2ForCausalLM"]})
    with pytest.raises(ModelError, match="GB of memory for its weights in bf16"):
        load(tmp_path, "bf16")


def test_loader_without_transformers_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_config(tmp_path, config_of("starcoder2").to_dict() | {"architectures": ["Starcoder2ForCausalLM"]})
    monkeypatch.setitem(__import__("sys").modules, "transformers.utils", None)
    with pytest.raises(ModelError, match=r"pip install 'syringa\[models\]'"):
        load(tmp_path)
