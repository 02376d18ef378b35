"""A model's weights are counted by the tables of its files, whatever they are packed in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from syringa.errors import ModelError
from syringa.modelfiles import ModelFiles, count_weights, locate
from tests.modelfiles.small_gguf import gguf, llama


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(gguf(llama(), {"a": (8, 4), "b": (3,)}))
    assert count_weights(ModelFiles("small", str(path), "gguf")) == 35


@pytest.mark.model
def test_the_default_model_is_more_than_its_file() -> None:
    files = locate("default")
    assert count_weights(files) == 134_515_008 > Path(files.path).stat().st_size


def test_a_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(8, 4, dtype=torch.bfloat16)}, tmp_path / "1.safetensors", {"format": "pt"})
    save_file({"b": torch.zeros(3), "c": torch.zeros(())}, tmp_path / "2.safetensors")
    assert count_weights(ModelFiles("small", str(tmp_path), "folder")) == 36


def test_weights_that_are_there_twice(tmp_path: Path) -> None:
    """Once in the files that the index names, once in one for other programs."""
    save_file({"a": torch.zeros(8, 4)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.zeros(8, 4)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert count_weights(ModelFiles("small", str(tmp_path), "folder")) == 32


@pytest.mark.parametrize("shape", ["[Infinity]", "[NaN]", "[-1]", '["8"]', "[8.5]", "8", "null"])
def test_a_shape_that_is_none(tmp_path: Path, shape: str) -> None:
    header = f'{{"a": {{"shape": {shape}}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="safetensors"):
        count_weights(ModelFiles("small", str(tmp_path), "folder"))


@pytest.mark.parametrize(
    "data", [b"", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"[]", b"\x0c" + b"\0" * 7 + b'{"a": "size"}', b"\x09" + b"\0" * 7]
)
def test_a_file_that_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelError, match="safetensors"):
        count_weights(ModelFiles("small", str(tmp_path), "folder"))
