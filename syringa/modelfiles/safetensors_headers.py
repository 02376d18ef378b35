"""The tensor tables of safetensors files; tensor data is not read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from syringa.errors import ModelError
from syringa.modelfiles.locate import SAFETENSORS_INDEX, read_json

_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors itself
_PACKED_NAMES = (".qweight", ".qzeros", ".weight_packed", ".weight_zero_point")  # eight 4-bit numbers per element


class StoredTensor(NamedTuple):
    """A tensor of a safetensors file."""

    dtype: str  # as safetensors names it: BF16, F8_E4M3, I32, …
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_headers(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by their names. Raise `ModelError` if a file is malformed."""
    index = read_json(folder / SAFETENSORS_INDEX).get("weight_map")
    # Some folders hold the weights a second time, in a file that the index does not list.
    named = {folder / str(file) for file in index.values()} if isinstance(index, dict) else None
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(named or folder.glob("*.safetensors")):
        tensors |= _read_header(path)
    return tensors


def count_numbers(tensors: dict[str, StoredTensor]) -> int:
    """Return how many weights the tensors hold: of MXFP4, GPTQ, AWQ and compressed-tensors, several per element."""
    return sum(tensor.elements * _numbers_in(name, tensor.dtype) for name, tensor in tensors.items())


def _numbers_in(name: str, dtype: str) -> int:
    if dtype == "U8" and name.endswith("_blocks"):
        return 2
    return 8 if dtype == "I32" and name.endswith(_PACKED_NAMES) else 1


def _read_header(path: Path) -> dict[str, StoredTensor]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MAX_HEADER_BYTES:
                raise ValueError
            table: dict[str, Any] = json.loads(file.read(length))
        tensors = {
            name: StoredTensor(str(tensor.get("dtype", "")), tuple(tensor["shape"]))
            for name, tensor in table.items()
            if name != "__metadata__"
        }
        if not all(type(size) is int and size >= 0 for tensor in tensors.values() for size in tensor.shape):
            raise ValueError
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} cannot be read as safetensors") from None
    return tensors
