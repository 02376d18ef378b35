"""The fingerprint of a worker: workers with the same one give the same outputs, bit by bit.

It covers the weights, the dtype, the kernels and instruction set, the kind of device and the versions. A request that
moves between two such workers continues exactly; a deterministic engine is assumed, see `Config.deterministic`.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec

from syringa.engine.cpu.features import cpu_flags
from syringa.modelfiles import ModelFiles
from syringa.types import ModelInfo
from syringa.version import installed_version

# Bytes hashed at the start of a file of weights: enough for its table of tensors, except in the largest models.
HEADER_BYTES = 1 << 20
# The instruction sets that libraries choose their kernels by.
_INSTRUCTION_SETS = ("avx2", "avx512", "avx_vnni", "amx", "f16c", "fma", "asimd", "bf16", "i8mm", "sve")


def worker_fingerprint(
    files: ModelFiles, info: ModelInfo, *, device: str, torch_version: str, cache_dtype: str = "auto"
) -> str:
    """Return the fingerprint of a worker. `device`: the name of its GPU, or "cpu"."""
    flags = sorted(each for each in cpu_flags() if each.startswith(_INSTRUCTION_SETS)) if device == "cpu" else []
    isa = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    versions = [installed_version(), torch_version, info.architecture]
    settings = [*versions, info.dtype, cache_dtype, info.kernels, device, isa, flags]
    digest = hashlib.blake2b(msgspec.json.encode(settings), digest_size=12)
    for path in _weight_files(Path(files.path)):
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            digest.update(file.read(HEADER_BYTES))
    return digest.hexdigest()


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(each for each in path.iterdir() if each.suffix in (".safetensors", ".json", ".gguf"))
