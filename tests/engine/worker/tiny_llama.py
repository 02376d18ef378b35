"""A tiny model with random weights and a byte-level tokenizer, which runs on the kernels of the native families."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = "<eos>"
SPECIAL = [EOS, "<think>", "</think>"]
MERGES = [("t", "h"), ("th", "e"), ("a", "n"), ("1", "2"), ('"', ":"), ("Ġ", "a")]
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY = 64, 2, 4, 2, 96, 272


@cache
def tiny_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: id_ for id_, text in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    made = Tokenizer(models.BPE(vocabulary, MERGES))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(each, normalized=False) for each in SPECIAL])
    assert made.get_vocab_size() <= VOCABULARY
    return made


def token_id(text: str) -> int:
    (id_,) = tiny_tokenizer().encode(text).ids
    return int(id_)


def save_tiny_llama(folder: Path, max_length: int = 512) -> None:
    """Write the model to a folder in the format of Hugging Face."""
    generator = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    head = HIDDEN // HEADS
    tensors = {
        "model.embed_tokens.weight": weight(VOCABULARY, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": weight(VOCABULARY, HIDDEN),
    }
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
        for name, rows in (("q", HEADS * head), ("k", KV_HEADS * head), ("v", KV_HEADS * head), ("o", HIDDEN)):
            tensors[f"{layer}.self_attn.{name}_proj.weight"] = weight(rows, HIDDEN)
        for name, shape in (
            ("gate", (INTERMEDIATE, HIDDEN)),
            ("up", (INTERMEDIATE, HIDDEN)),
            ("down", (HIDDEN, INTERMEDIATE)),
        ):
            tensors[f"{layer}.mlp.{name}_proj.weight"] = weight(*shape)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INTERMEDIATE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": max_length,
        "hidden_act": "silu",
        "eos_token_id": token_id(EOS),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    tiny_tokenizer().save(str(folder / "tokenizer.json"))
