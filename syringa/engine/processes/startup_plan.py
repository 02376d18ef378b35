"""What will happen when a model is loaded now, for the command line, which prints it, or why the model cannot fit."""

from __future__ import annotations

import msgspec

from syringa import modelfiles
from syringa.config import Config, ModelSpec
from syringa.engine.cpu.features import available_cores, available_memory
from syringa.engine.cpu.native import kernel_variant
from syringa.engine.loading import alternatives
from syringa.engine.loading.memory_plan import PROGRAM_BYTES, MemorySettings, plan_gpu_memory, plan_memory
from syringa.engine.loading.memory_plan import MemoryPlan as MemoryPlan
from syringa.engine.loading.model_size import estimate_model_size, read_model_size
from syringa.engine.loading.model_size import gigabytes as gigabytes
from syringa.engine.models.hf import check_transformers
from syringa.engine.processes import eviction
from syringa.engine.processes.memory import MemoryPlanner, replica_threads
from syringa.engine.processes.nvml import gpu_memories
from syringa.engine.vllm.launch import check_interpreter
from syringa.engine.worker.options import WorkerOptions
from syringa.modelfiles.catalog import CatalogModel


def plan_model(spec: ModelSpec, config: Config, replicas: int = 1) -> MemoryPlan | None:
    """Plan the memory of a model that is loaded now. None on a GPU whose memory is not known, and for vLLM.

    Raise `StartupError` with one line if it does not fit on the CPU. Whether it fits on a GPU, only its worker can say.
    """
    options = WorkerOptions.from_config(spec, config)
    if options.engine == "vllm":  # it has its own rules
        check_interpreter(options.python)
        return None
    options = msgspec.structs.replace(options, threads=replica_threads(options.threads, replicas))
    files = modelfiles.locate(options.model)
    size, settings = read_model_size(files, modelfiles.describe(files)), MemorySettings.of(options)
    planner = MemoryPlanner(config, available_memory, gpu_memories)
    if planner.expected_device(options) == "cpu":
        if options.dtype == "fp8":
            return None  # the worker says why it has no GPU
        free, kernels = available_memory(), kernel_variant()
        return plan_memory(size, settings, free=free, kernels=kernels, cores=available_cores())
    gpus = gpu_memories()
    if not gpus:
        return None
    gpu = gpus[planner.choose_gpus([])[0]]
    return plan_gpu_memory(
        size,
        settings,
        gpu.free,
        gpu.total,
        overhead=eviction.GPU_OVERHEAD,
        fraction=planner.gpu_fraction(options, []),
        cores=available_cores(),
    )


def check_catalog_model(entry: CatalogModel, spec: ModelSpec, config: Config) -> None:
    """Raise `StartupError` with one line if a model of the catalog, whose files are not here yet, cannot run here.

    Whether it fits on a GPU, only its worker can say.
    """
    options = WorkerOptions.from_config(spec, config)
    if options.engine == "vllm":
        return
    if entry.needs_models:
        check_transformers(entry.name)
    planner = MemoryPlanner(config, available_memory, gpu_memories)
    if planner.expected_device(options) == "cuda" or options.dtype == "fp8":
        return
    size = estimate_model_size(entry)
    # The file, which is not here yet, says which context is too long.
    size = msgspec.structs.replace(size, max_model_len=max(size.max_model_len, options.max_model_len))
    free, kernels = available_memory(), kernel_variant()
    plan_memory(size, MemorySettings.of(options), free=free, kernels=kernels, cores=available_cores())


def fitting_models() -> tuple[int, set[str]]:
    """Return the free bytes of this machine, and the names of the models of the catalog that fit in them."""
    free = available_memory()
    return free, {entry.name for entry in alternatives.fitting_models(free, PROGRAM_BYTES)}
