from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from syringa.errors import ModelError
from syringa.modelfiles import ModelDescription, count_weights, describe, locate
from syringa.modelfiles.locate import ModelFiles

from .gguf_builder import TENSORS, gguf, llama

TOKENIZER = {
    "added_tokens": [
        {"id": 10, "content": "<s>", "special": True},
        {"id": 11, "content": "</s>", "special": True},
        {"id": 12, "content": "<|end|>", "special": True},
    ],
    "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []},
}
TEMPLATE_PROCESSING = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
}


def folder(path: Path, **files: Any) -> ModelDescription:
    """Write these files to a folder and describe it. The ends `_json` and `_jinja` of names become suffixes."""
    contents = {
        "config_json": {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128, "eos_token_id": 11},
        "tokenizer_json": TOKENIZER,
        "tokenizer_config_json": {"eos_token": "</s>", "bos_token": {"content": "<s>"}},
        **files,
    }
    for name, content in contents.items():
        stem, _, suffix = name.rpartition("_")
        (path / f"{stem}.{suffix}").write_text(content if isinstance(content, str) else json.dumps(content))
    return describe(ModelFiles("m", str(path), "folder"))


def test_describe_default_model() -> None:
    description = describe(locate("default"))
    assert description.architecture == "LlamaForCausalLM"
    assert description.max_model_len == 8192
    assert description.end_tokens == {0, 2}  # <|endoftext|>, <|im_end|>
    assert (description.bos_token, description.add_bos) == (1, False)
    assert "<|im_start|>" in (description.chat_template or "")
    assert description.special_tokens["eos_token"] == "<|im_end|>"


def test_describe_gguf_end_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama(tokenizer__ggml__eot_token_id=2), TENSORS))
    assert describe(locate(str(path))).end_tokens == {0, 1, 2}
    tokens = ["<|end|>", "<|return|>", "<|im_end|>"]
    changes = {"tokenizer__ggml__tokens": tokens, "tokenizer__ggml__token_type": [3, 3, 1]}
    path.write_bytes(gguf(llama(tokenizer__ggml__eos_token_id=None, **changes), {"token_embd.weight": (8, 3)}))
    # Neither <|end|>, because <|return|> exists, nor <|im_end|>, which is an ordinary token here.
    assert describe(locate(str(path))).end_tokens == {1}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, False),
        ({"tokenizer__ggml__pre": "llama-bpe"}, True),
        ({"tokenizer__ggml__model": "llama"}, True),
        ({"tokenizer__ggml__pre": "llama-bpe", "tokenizer__ggml__add_bos_token": False}, False),
        ({"tokenizer__ggml__add_bos_token": True}, True),
    ],
)
def test_describe_gguf_add_bos(tmp_path: Path, changes: dict[str, Any], expected: bool) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama(**changes), TENSORS))
    assert describe(locate(str(path))).add_bos is expected


def test_describe_folder_collects_end_tokens_of_all_files(tmp_path: Path) -> None:
    assert folder(tmp_path).end_tokens == {11}
    assert folder(tmp_path, generation_config_json={"eos_token_id": [7, 8]}).end_tokens == {7, 8, 11}
    assert folder(tmp_path, tokenizer_config_json={"eos_token": "<|end|>"}).end_tokens == {7, 8, 11, 12}
    config = {"architectures": ["X"], "text_config": {"eos_token_id": 3, "max_position_embeddings": 99}}
    nested = folder(tmp_path, config_json=config, generation_config_json={"eos_token_id": 5}, tokenizer_config_json={})
    assert nested.end_tokens == {3, 5}
    assert nested.max_model_len == 99


def test_describe_folder_bos_token(tmp_path: Path) -> None:
    assert (folder(tmp_path).bos_token, folder(tmp_path).add_bos) == (10, False)
    sequence = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, TEMPLATE_PROCESSING]}
    for processor in (TEMPLATE_PROCESSING, sequence):
        description = folder(tmp_path, tokenizer_json={**TOKENIZER, "post_processor": processor})
        assert (description.bos_token, description.add_bos) == (10, True)
    assert folder(tmp_path, tokenizer_config_json={"add_bos_token": False}).add_bos is False


def test_describe_folder_chat_templates(tmp_path: Path) -> None:
    assert folder(tmp_path).chat_template is None
    assert folder(tmp_path, tokenizer_config_json={"chat_template": "one"}).chat_template == "one"
    templates = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    description = folder(tmp_path, tokenizer_config_json={"chat_template": templates})
    assert (description.chat_template, description.tool_template) == ("two", "three")
    assert folder(tmp_path, chat_template_jinja="four").chat_template == "four"


def test_describe_folder_max_length(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = {"architectures": ["X"], "max_position_embeddings": 128, "rope_scaling": scaling}
    assert folder(tmp_path, config_json=config).max_model_len == 512
    short = {"architectures": ["X"]}
    assert folder(tmp_path, config_json=short, tokenizer_config_json={"model_max_length": 77}).max_model_len == 77
    assert folder(tmp_path, config_json=short, tokenizer_config_json={"model_max_length": 1e30}).max_model_len == 2048


def test_describe_folder_supports_images(tmp_path: Path) -> None:
    assert folder(tmp_path).supports_images is False
    config = {"architectures": ["X"], "vision_config": {"hidden_size": 8}, "text_config": {"model_type": "gemma3_text"}}
    description = folder(tmp_path, config_json=config)
    assert description.supports_images is True
    assert description.max_model_len == 131072  # missing in the config


def test_describe_names_malformed_file(tmp_path: Path) -> None:
    odd = {"tokenizer_config_json": {"chat_template": ["x"]}}
    with pytest.raises(ModelError, match="in a way that can be read"):
        folder(tmp_path, **odd)
    for broken in ({"config_json": "{"}, {"config_json": "[]"}, {"config_json": "{}"}, {"tokenizer_json": "[["}):
        with pytest.raises(ModelError, match=r"config\.json|tokenizer\.json"):
            folder(tmp_path, **broken)


def test_count_weights_of_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf(llama(), {"a": (8, 4), "b": (3,)}))
    assert count_weights(ModelFiles("small", str(path), "gguf")) == 35


@pytest.mark.model
def test_count_weights_of_default_model() -> None:
    files = locate("default")
    assert count_weights(files) == 134_515_008 > Path(files.path).stat().st_size


def test_count_weights_of_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8, 4, dtype=torch.bfloat16)}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"b": torch.zeros(3), "c": torch.zeros(())}, tmp_path / "2.safetensors")
    assert count_weights(ModelFiles("small", str(tmp_path), "folder")) == 36


def test_count_weights_counts_two_per_byte_of_mxfp4(tmp_path: Path) -> None:
    blocks = {"down_proj_blocks": torch.zeros(8, 2, 16, dtype=torch.uint8), "a_blocks": torch.zeros(3)}
    save_file(blocks, tmp_path / "1.safetensors")
    assert count_weights(ModelFiles("small", str(tmp_path), "folder")) == 2 * 8 * 2 * 16 + 3


def test_count_weights_ignores_files_outside_index(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8, 4)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(8, 4)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert count_weights(ModelFiles("small", str(tmp_path), "folder")) == 32


@pytest.mark.parametrize("shape", ["[Infinity]", "[NaN]", "[-1]", '["8"]', "[8.5]", "8", "null"])
def test_count_weights_refuses_invalid_shape(tmp_path: Path, shape: str) -> None:
    header = f'{{"a": {{"shape": {shape}}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="safetensors"):
        count_weights(ModelFiles("small", str(tmp_path), "folder"))


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x0c" + b"\0" * 7 + b'{"a": "size"}', b"\x09" + b"\0" * 7]
)
def test_count_weights_refuses_invalid_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="safetensors"):
        count_weights(ModelFiles("small", str(tmp_path), "folder"))
