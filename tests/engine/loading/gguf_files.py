"""Small GGUF models of one layer with quantized weights, which are all zero."""

from __future__ import annotations

from pathlib import Path

from tests.modelfiles.gguf_builder import StoredTensor, Tensor, gguf, llama

HIDDEN, INTERMEDIATE, VOCAB, KV = 256, 512, 6, 128
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN, KV),
    "attn_v": (HIDDEN, KV),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (HIDDEN, INTERMEDIATE),
    "ffn_up": (HIDDEN, INTERMEDIATE),
    "ffn_down": (INTERMEDIATE, HIDDEN),
}
CACHE_BYTES = 2 * KV * 2  # of a token, in bf16
TYPES = {"Q4_K": (12, 256, 144), "Q6_K": (14, 256, 210), "Q2_K": (10, 256, 84)}  # number, block, bytes of a block


def quantized_bytes(elements: int, kind: str) -> int:
    _, block, size = TYPES[kind]
    return elements // block * size


def write_gguf(path: Path, *, head: bool = False, context: int = 8192, window: int = 0, **types: str) -> Path:
    """Write a model in Q4_K with an embedding in Q6_K. `types` are those of other matrices."""
    embedding = _zeros((HIDDEN, VOCAB), types.get("token_embd", "Q6_K"))
    tensors: dict[str, Tensor] = {"token_embd.weight": embedding, "output_norm.weight": (HIDDEN,)}
    if head:
        tensors["output.weight"] = _zeros((HIDDEN, VOCAB), "Q6_K")
    tensors |= {f"blk.0.{name}_norm.weight": (HIDDEN,) for name in ("attn", "ffn")}
    tensors |= {f"blk.0.{name}.weight": _zeros(shape, types.get(name, "Q4_K")) for name, shape in MATRICES.items()}
    metadata = llama(
        llama__embedding_length=HIDDEN,
        llama__feed_forward_length=INTERMEDIATE,
        llama__attention__head_count=4,
        llama__attention__head_count_kv=2,
        llama__context_length=context,
        general__file_type=15,
        **({"llama__attention__sliding_window": window} if window else {}),
    )
    path.write_bytes(gguf(metadata, tensors))
    return path


def _zeros(shape: tuple[int, int], kind: str) -> Tensor:
    return StoredTensor(shape, TYPES[kind][0], bytes(quantized_bytes(shape[0] * shape[1], kind)))
