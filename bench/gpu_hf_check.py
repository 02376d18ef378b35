"""Check models on transformers' definitions on a GPU: part of `bench.gpu_check`."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch

from bench.gpu_check import MAX_ERROR, Log, check_outputs, distance, logits_of, make_requests
from syringa.engine.loading.loaded_model import LoadOptions
from syringa.engine.loading.loader import load_model

HF_BASE_CONFIG = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 1_000,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HF_MODELS: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 64, "sliding_window": 40, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 50},
    "phi3": {"sliding_window": 40},
    "gemma3_text": {"head_dim": 256, "sliding_window": 40, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "head_dim": 64},
    "gpt_oss": {"head_dim": 64, "sliding_window": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
}


def save_small(family: str, folder: str) -> list[Any]:
    """Write a model with random weights, and return transformers' instances of it on the GPU, in fp32 and bf16."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **(HF_BASE_CONFIG | HF_MODELS[family]))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():  # large enough that positions, windows and caps matter
        wide = parameter.dim() > 1
        parameter.data = torch.randn_like(parameter) * 0.05 if wide else parameter + torch.randn_like(parameter) * 0.1
    model.save_pretrained(folder)
    Tokenizer(WordLevel({f"t{i}": i for i in range(1_000)}, unk_token="t0")).save(f"{folder}/tokenizer.json")
    half = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.bfloat16).eval()
    return [model.cuda(), half.cuda()]


@torch.inference_mode()
def hf_logits(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [model(torch.tensor([prompt], device="cuda"), use_cache=False).logits[0].float() for prompt in prompts]


def check_hf_models(log: Log) -> bool:
    """Check models on transformers' definitions: at limit twice as far from transformers' fp32 as its own bf16."""
    rng = random.Random(4)
    prompts = [[rng.randrange(1_000) for _ in range(n)] for n in (150, 3, 97, 16, 64, 201)]
    passed = True
    for family in HF_MODELS:
        with tempfile.TemporaryDirectory() as folder:
            exact, rounded = save_small(family, folder)
            loaded = load_model(LoadOptions(model=folder, device="cuda"))
        expected = hf_logits(exact, prompts)
        half = max(map(distance, hf_logits(rounded, prompts), expected))
        errors = [max(map(distance, logits_of(loaded, prompts, chunk), expected)) for chunk in (1000, 29, 1)]
        fine = max(errors) < max(MAX_ERROR, 2 * half)
        shown = ", ".join(f"{error:.1e}" for error in errors)
        status = "" if fine else " WRONG"
        log(f"  {family}: whole, in chunks, token by token: {shown}; transformers in bf16: {half:.1e}{status}")
        passed &= fine
        if family in ("gemma2", "phi3"):  # with soft caps, and without
            passed &= check_outputs(loaded, make_requests(1_000), log, max(0.06, 8 * max(errors)))
    return passed
