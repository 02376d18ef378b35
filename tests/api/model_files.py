"""Files of a model without weights, which the API server does not need."""

from __future__ import annotations

import json
from pathlib import Path

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOL_TEMPLATE = "{{ tools }}<tool_call>"


def write_model_folder(path: Path, **config: object) -> str:
    """Write the files into a folder and return its path."""
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 64}
    tokens = [{"id": 1, "content": "<think>", "special": False, "normalized": False}]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [token | flags for token in tokens],
        "model": {"type": "BPE", "vocab": {"a": 0, "<think>": 1}, "merges": []},
    }
    templates = [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": TOOL_TEMPLATE}]
    (path / "config.json").write_text(json.dumps(known | config))
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    (path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    return str(path)
