"""A tiny model that chats."""

from __future__ import annotations

from pathlib import Path

from tests.modelfiles.gguf_builder import gguf, llama

HIDDEN, INNER, VOCABULARY = 32, 64, 6


def write_model(path: Path) -> None:
    """Write a model whose weights are all equal: each of its tokens is as likely as another."""
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (HIDDEN, 16), "attn_v": (HIDDEN, 16)}
    shapes |= {"attn_output": (HIDDEN, HIDDEN), "ffn_gate": (HIDDEN, INNER), "ffn_up": (HIDDEN, INNER)}
    shapes |= {"ffn_down": (INNER, HIDDEN)}
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (HIDDEN, VOCABULARY), "output_norm.weight": (HIDDEN,)}
    tensors |= {f"blk.0.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {f"blk.0.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
    metadata = llama(
        llama__embedding_length=HIDDEN,
        llama__feed_forward_length=INNER,
        llama__context_length=1 << 17,
        tokenizer__chat_template="{% for message in messages %}{{ message.content }}{% endfor %}",
    )
    path.write_bytes(gguf(metadata, tensors))
