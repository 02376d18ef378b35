"""The memory of a worker on vLLM, as the supervisor plans with it. vLLM takes what it is given, by its own rules."""

from __future__ import annotations

from pathlib import Path

from syringa.engine.processes.eviction import GPU_OVERHEAD
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
    return weight_bytes(options.model) + (_cache_bytes(options) or CPU_CACHE_BYTES) + PROGRAM_BYTES


def gpu_bytes(options: WorkerOptions, total: int) -> int:
    """Return the bytes that a worker takes of each of its GPUs, which have a memory of `total`."""
    if cache := _cache_bytes(options):
        return weight_bytes(options.model) // options.gpus + cache + GPU_OVERHEAD
    given = options.engine_args.get("gpu_memory_utilization", options.gpu_memory_fraction)
    return int(total * (given if isinstance(given, float | int) and 0 < given <= 1 else GPU_UTILIZATION))


def sets_cache_size(options: WorkerOptions) -> bool:
    """Return whether the size of the KV cache, or the fraction of memory to use, is set."""
    names = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")
    return bool(options.kv_cache_gb or options.gpu_memory_fraction or options.engine_args.keys() & set(names))


def _cache_bytes(options: WorkerOptions) -> int:
    """Return the size of the KV cache that is set; 0: none."""
    given = options.engine_args.get("kv_cache_memory_bytes")
    return given if isinstance(given, int) and given > 0 else int(options.kv_cache_gb * (1 << 30))
