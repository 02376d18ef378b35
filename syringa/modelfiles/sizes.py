"""How many numbers a model's weights are, whatever they are packed in on disk."""

from __future__ import annotations

import json
import math
from pathlib import Path

from syringa.errors import ModelError
from syringa.modelfiles.gguf import read_gguf
from syringa.modelfiles.locate import INDEX, ModelFiles, read_json

_LONGEST_HEADER = 100_000_000  # what safetensors itself reads


def count_weights(files: ModelFiles) -> int:
    """Going by the files' tables; the weights themselves are not read."""
    if files.kind == "gguf":
        return sum(math.prod(tensor.shape) for tensor in read_gguf(files.path).tensors.values())
    folder = Path(files.path)
    index = read_json(folder / INDEX).get("weight_map")
    # Some folders hold the same weights a second time, in one file that the index does not name.
    named = {folder / str(file) for file in index.values()} if isinstance(index, dict) else None
    return sum(map(_count_safetensors, named or folder.glob("*.safetensors")))


def _count_safetensors(path: Path) -> int:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError
            table = json.loads(file.read(length))
        shapes = [tensor["shape"] for name, tensor in table.items() if name != "__metadata__"]
        if not all(type(size) is int and size >= 0 for shape in shapes for size in shape):
            raise ValueError
        return sum(map(math.prod, shapes))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} cannot be read as safetensors") from None
