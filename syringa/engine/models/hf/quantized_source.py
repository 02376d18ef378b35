"""Weights of `transformers`' models from quantized folders: dequantized one by one, when `transformers` reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import torch

from syringa.engine.loading.quantized import QuantizedWeights, mxfp4_weight
from syringa.engine.loading.weights import MXFP4_SUFFIXES, SafetensorsWeights
from syringa.engine.models.config import read_config
from syringa.engine.models.decoder import check_shapes
from syringa.engine.models.quantization import read_quantization
from syringa.modelfiles import ModelFiles

_BLOCKS, _SCALES = MXFP4_SUFFIXES


class _Reader:
    """Reads one tensor at a time, each of which is held in fp32 for a moment; none after one that cannot be read.

    `transformers` reads in several threads, which go on when a model cannot be loaded.
    """

    def __init__(self, read: Callable[[str], torch.Tensor]) -> None:
        self._read = read
        self._lock = Lock()
        self._error: Exception | None = None

    def __call__(self, name: str) -> torch.Tensor:
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                return self._read(name)
            except Exception as error:
                self._error = error
                raise


class LazyWeight:
    """A tensor that is read when `transformers` loads it, as it does with slices of safetensors files."""

    def __init__(self, reader: _Reader, name: str) -> None:
        self.reader, self.name = reader, name

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.reader(self.name)


def dequantized_state_dict(files: ModelFiles, config: dict[str, Any], dtype: torch.dtype) -> dict[str, LazyWeight]:
    """Return the tensors of a quantized folder for `from_pretrained`, under the names of a folder in `dtype`.

    Its model is one that the native decoder runs on a GPU. Raise `ModelError` for missing tensors and wrong shapes.
    """
    folder = SafetensorsWeights(Path(files.path))
    quantization = read_quantization(config)
    weights: QuantizedWeights | _Mxfp4Weights
    if quantization is None:
        check_shapes(read_config(config), folder, files.path)
        weights = _Mxfp4Weights(folder)
    else:
        weights = QuantizedWeights(folder, quantization)
        check_shapes(read_config(config), weights, files.path)

    def read(name: str) -> torch.Tensor:
        tensor = weights(name)
        return tensor.to(dtype) if weights.is_quantized(name) else tensor

    reader = _Reader(read)
    return {name: LazyWeight(reader, name) for name in weights.names()}


class _Mxfp4Weights:
    """The tensors of a gpt-oss folder, with its experts as inputs × outputs."""

    def __init__(self, folder: SafetensorsWeights) -> None:
        self._folder = folder

    def names(self) -> list[str]:
        return [name.removesuffix(_BLOCKS) for name in self._folder.files if not name.endswith(_SCALES)]

    def is_quantized(self, name: str) -> bool:
        return self._folder.has(name + _BLOCKS)

    def __call__(self, name: str) -> torch.Tensor:
        if not self.is_quantized(name):
            return self._folder(name)
        blocks, scales = self._folder(name + _BLOCKS), self._folder(name + _SCALES)
        experts, outputs, groups, _ = blocks.shape
        found = torch.empty(experts, 32 * groups, outputs, dtype=torch.bfloat16)  # which has all numbers of MXFP4
        for e in range(experts):
            found[e] = mxfp4_weight(blocks[e], scales[e]).dequantize().T
        return found
