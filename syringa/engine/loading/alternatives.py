"""What would fit instead of a model that does not: another dtype or quantization of it, or a smaller model."""

from __future__ import annotations

from collections.abc import Mapping

from syringa.engine.loading.gpu_size import GPU_OVERHEAD, MIN_GPU_OVERHEAD
from syringa.engine.loading.model_size import ModelSize, estimate_model_size, gigabytes
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


def describe_gpu_alternatives(weights: int, free: int, *, in_fp8: int = 0) -> str:
    """Return what would fit in `free` bytes of a GPU instead of so many bytes of weights, as the rest of a message.

    `in_fp8`: the bytes of the weights with --dtype fp8, if it may be suggested.
    """
    if 0 < in_fp8 < weights and in_fp8 + MIN_GPU_OVERHEAD <= free:
        return f"--dtype fp8 would fit ({gigabytes(in_fp8 + MIN_GPU_OVERHEAD)}), or use --device cpu"
    fitting = {
        entry.name: needed
        for entry in catalog.CATALOG
        if entry.kind == "generate" and (size := estimate_model_size(entry))
        if size.gpu_weights("auto") < weights and (needed := catalog_gpu_memory(entry, size) + GPU_OVERHEAD) <= free
    }
    if not fitting:
        return "choose a smaller model, or --device cpu"
    name = max(fitting, key=lambda each: fitting[each])
    return f"{name} of `syringa models --available` fits ({gigabytes(fitting[name])}), or use --device cpu"


def catalog_gpu_memory(entry: catalog.CatalogModel, size: ModelSize) -> int:
    """Return the bytes on a GPU of the weights of a model of the catalog, and of a cache of `CONTEXT_SHOWN` tokens."""
    return size.gpu_weights("auto") + size.cache_bytes("bf16") * min(entry.context, catalog.CONTEXT_SHOWN)


def _replaces(entry: catalog.CatalogModel, weights: int) -> bool:
    """Return whether a model of the catalog is smaller and generates text."""
    return entry.kind == "generate" and entry.bytes < weights
