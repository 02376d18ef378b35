"""The memory of a worker on vLLM, as the supervisor plans with it. vLLM takes what it is given, by its own rules."""

from __future__ import annotations

from pathlib import Path

from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ModelError
from syringa.modelfiles import locate

PROGRAM_BYTES = 3 << 30  # of vLLM's processes, each of which has loaded torch, without weights and cache
CPU_CACHE_BYTES = 4 << 30  # of the KV cache on a CPU, where no size is set: vLLM would take almost all memory
GPU_UTILIZATION = 0.92  # vLLM's default


def weight_bytes(model: str) -> int:
    """Return the size of a model's files of weights; 0 if they cannot be read, which the worker reports."""
    try:
        return sum(each.stat().st_size for each in Path(locate(model).path).glob("*.safetensors"))
    except (ModelError, OSError):
        return 0


def cpu_bytes(options: WorkerOptions) -> int:
    """Return the bytes that a worker needs on the host, if it runs on a CPU."""
    cache = options.engine_args.get("kv_cache_memory_bytes") or int(options.kv_cache_gb * (1 << 30)) or CPU_CACHE_BYTES
    return weight_bytes(options.model) + cache + PROGRAM_BYTES


def sets_cache_size(options: WorkerOptions) -> bool:
    """Return whether the size of the KV cache, or the fraction of memory to use, is set."""
    names = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")
    return bool(options.kv_cache_gb or options.gpu_memory_fraction or options.engine_args.keys() & set(names))


def gpu_utilization(options: WorkerOptions) -> float:
    """Return the fraction of each of its GPUs that a worker will take."""
    given = options.engine_args.get("gpu_memory_utilization", options.gpu_memory_fraction)
    return given if isinstance(given, float | int) and 0 < given <= 1 else GPU_UTILIZATION
