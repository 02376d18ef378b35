"""Builds tiny GGUF files."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

ALIGNMENT = 32


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", 8) + string(item)
    kind, body = 8, b""
    if item and isinstance(item[0], str):
        body = b"".join(string(text) for text in item)
    elif item and isinstance(item[0], float):
        kind, body = 6, struct.pack(f"<{len(item)}f", *item)
    else:
        kind, body = 5, struct.pack(f"<{len(item)}i", *item)
    return struct.pack("<IIQ", 9, kind, len(item)) + body


class StoredTensor(NamedTuple):
    shape: tuple[int, ...]
    type: int
    data: bytes


Tensor = tuple[int, ...] | StoredTensor  # the shape of an F32 tensor of ones, or a tensor with its data


def gguf(metadata: dict[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Return a GGUF file."""
    tensors = tensors or {}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, tensor in tensors.items():
        shape, kind, content = _stored(tensor)
        head += string(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
        head += struct.pack("<IQ", kind, len(data))
        data += content + b"\0" * (-len(content) % ALIGNMENT)
    return head + b"\0" * (-len(head) % ALIGNMENT) + data


def _stored(tensor: Tensor) -> StoredTensor:
    if isinstance(tensor, StoredTensor):
        return tensor
    return StoredTensor(tensor, 0, struct.pack("<f", 1.0) * math.prod(tensor))


def llama(**changes: Any) -> dict[str, Any]:
    """Return the metadata of a tiny model. None removes a key; `__` stands for a dot."""
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 16,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_end|>", "a", "b", "ab", "<tool>"],
        "tokenizer.ggml.token_type": [3, 3, 1, 1, 1, 4],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 0,
    }
    architecture = changes.get("general__architecture")
    if architecture:
        metadata = {key.replace("llama.", f"{architecture}.", 1): item for key, item in metadata.items()}
    for key, item in changes.items():
        metadata[key.replace("__", ".")] = item
    return {key: item for key, item in metadata.items() if item is not None}


TENSORS = {"token_embd.weight": (8, 6), "blk.0.attn_q.weight": (8, 8)}


def write_parts(folder: Path) -> list[Path]:
    """Write a model of two parts, with half of the tensors in each."""
    names = list(TENSORS)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    parts = []
    for number, half in enumerate(halves):
        metadata = {**(llama() if number == 0 else {}), "split.no": number, "split.count": 2}
        metadata["split.tensors.count"] = len(names)
        parts.append(folder / f"model-{number + 1:05}-of-00002.gguf")
        parts[-1].write_bytes(gguf(metadata, {name: TENSORS[name] for name in half}))
    return parts
