"""What would fit instead of a model that does not: another dtype or quantization of it, or a smaller model."""

from __future__ import annotations

from collections.abc import Mapping

from syringa.engine.loading.model_size import ModelSize, gigabytes
from syringa.modelfiles import catalog

Q4_BYTES_PER_WEIGHT = 0.61  # of a GGUF file in Q4_K_M
QUANTIZED = ("int8", "gguf")  # dtypes of the compiled kernels
MIN_SAVING = 0.8  # of the weights, for a quantization to be suggested


def describe_alternatives(
    model: ModelSize, dtype: str, needs: Mapping[str, int], free: int, program: int, *, compiled: bool
) -> str:
    """Return what would fit in `free` bytes, as the rest of an error message.

    `needs`: of the model by dtype; `program`: the bytes of the processes; `compiled`: whether there are the compiled
    kernels, without which quantized weights take as much memory as others.
    """
    for other, need in sorted(needs.items(), key=lambda item: -item[1]):
        if other not in (dtype, "fp32") and (compiled or other not in QUANTIZED) and need <= free:
            return f"--dtype {other} would fit ({gigabytes(need)})"
    if not compiled:
        return "free some memory, choose a smaller model, or install a C++ compiler and reinstall for quantized weights"
    hints = []
    quantized = int(model.parameters * Q4_BYTES_PER_WEIGHT)
    need = needs[dtype] - max(model.weights[dtype], model.loading.get(dtype, 0)) + quantized
    if quantized < MIN_SAVING * model.weights[dtype] and need <= free:
        hints.append(f"a GGUF file of it in Q4_K_M would fit (about {gigabytes(need)})")
    fitting = [entry for entry in catalog.CATALOG if entry.memory + program <= free]
    smaller = [entry for entry in fitting if _replaces(entry, model.weights[dtype])]
    if smaller:
        largest = max(smaller, key=lambda entry: entry.bytes)
        hints.append(f"{largest.name} of `syringa models --available` fits ({gigabytes(largest.memory + program)})")
    return ", and ".join(hints) or "free some memory, or choose a smaller model"


def _replaces(entry: catalog.CatalogModel, weights: int) -> bool:
    """Return whether a model of the catalog is smaller and generates text."""
    return entry.kind == "generate" and entry.bytes < weights
