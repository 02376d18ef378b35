"""Tiny models with random weights, saved as Hugging Face folders, and helpers to run prompts through them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from syringa.engine.execution.batch import build_step_tensors, locate_states
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 160,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
PROMPTS = [[(7 * i * i + 3 * i + 11 * j) % 150 + 5 for i in range(length)] for j, length in enumerate((45, 3, 70, 16))]


def save(folder: Path, config: Any) -> Any:
    """Save a model of this config. Return it as loaded by transformers, in fp32 with eager attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    for parameter in model.parameters():  # large enough that positions, windows and softcap change the logits
        wide = parameter.dim() > 1
        parameter.data = torch.randn_like(parameter) * 0.08 if wide else parameter + torch.randn_like(parameter) * 0.1
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    Tokenizer(WordLevel({f"t{i}": i for i in range(160)}, unk_token="t0")).save(str(folder / "tokenizer.json"))


def run(
    loaded: LoadedModel, prompts: list[list[int]], chunk: int = 0, rows: Sequence[int] | None = None
) -> list[torch.Tensor]:
    """Return the logits of every token. All prompts run in one batch, in chunks of `chunk` tokens (0: whole).

    `rows`: compute the logits of these rows of the batch only, and return them as one tensor.
    """
    needed = [-(-len(prompt) // BLOCK_SIZE) for prompt in prompts]
    states = loaded.cache.states.allocate(len(prompts)) if loaded.cache.states is not None else None
    cache = loaded.cache.allocate(sum(needed), states)
    order = torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1)).tolist()
    sequences = [
        SimpleNamespace(tokens=prompt, block_table=[order.pop() for _ in range(n)], state_slot=slot)
        for slot, (prompt, n) in enumerate(zip(prompts, needed, strict=True))
    ]
    found: list[list[torch.Tensor]] = [[] for _ in prompts]
    done = 0
    while left := [(i, s) for i, s in enumerate(sequences) if len(s.tokens) > done]:
        items: list[Any] = [
            SimpleNamespace(
                sequence=s, start=done, count=min(chunk or len(s.tokens), len(s.tokens) - done), snapshot=None
            )
            for _, s in left
        ]
        counts = [item.count for item in items]
        step = build_step_tensors(items, range(sum(counts)) if rows is None else rows)
        step.states = locate_states(items) if states is not None else None
        logits = loaded.model.forward(step, cache)
        if rows is not None:
            return [logits]
        for (i, _), part in zip(left, logits.split(counts), strict=True):
            found[i].append(part)
        if not chunk:
            break
        done += chunk
    return [torch.cat(parts) for parts in found]


class CountedCalls:
    """Stands in for a layer, and counts its calls."""

    def __init__(self, layer: Any) -> None:
        self.layer, self.calls = layer, 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        return self.layer(*args, **options)


def reference(model: Any, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0].float()
    return logits


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference relative to the largest logit."""
    return float((got - expected).abs().max() / expected.abs().max())
