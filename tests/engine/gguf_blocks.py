"""Random tensors in the quantized formats of GGUF files."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

# Offsets of the half-precision numbers in a block; of other types, one at the beginning.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "MXFP4": (),
    "NVFP4": (),
}


def block_size(type_name: str) -> tuple[int, int]:
    """Return the inputs and bytes of a block."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    return inputs, size


def random_blocks(type_name: str, rows: int, inputs: int, seed: int = 0, scale: float = 0.01) -> np.ndarray:
    """Return the bytes of each row: every bit is random, apart from the scales."""
    random = np.random.default_rng(seed)
    per_block, size = block_size(type_name)
    blocks = random.integers(0, 256, (rows, inputs // per_block, size), dtype=np.uint8)
    for offset in HALVES.get(type_name, (0,)):
        scales = random.normal(0, scale, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, offset : offset + 2] = scales[:, :, None].view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, :, 0] = random.integers(118, 122, blocks.shape[:2])
    if type_name == "NVFP4":
        blocks[:, :, :4] = random.integers(4, 20, (*blocks.shape[:2], 4))
    return blocks.reshape(rows, -1)


def dequantize(blocks: np.ndarray, type_name: str) -> np.ndarray:
    weights: np.ndarray = quants.dequantize(blocks, GGMLQuantizationType[type_name])
    return weights
