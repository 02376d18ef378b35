"""What will happen when a model is loaded now, for the command line, which prints it, or why the model cannot fit."""

from __future__ import annotations

import msgspec

from syringa import modelfiles
from syringa.config import Config, ModelSpec
from syringa.engine.cpu.features import available_cores, available_memory
from syringa.engine.cpu.native import kernel_variant
from syringa.engine.loading.alternatives import catalog_gpu_memory
from syringa.engine.loading.memory_plan import (
    GPU_MARGIN,
    PROGRAM_BYTES,
    MemorySettings,
    plan_gpu_memory,
    plan_memory,
)
from syringa.engine.loading.memory_plan import MemoryPlan as MemoryPlan
from syringa.engine.loading.model_size import ModelSize, estimate_model_size, read_model_size
from syringa.engine.loading.model_size import gigabytes as gigabytes
from syringa.engine.loading.precision import choose_dtype
from syringa.engine.loading.preview_size import estimate_gguf, read_folder
from syringa.engine.models.config import is_native
from syringa.engine.models.hf import check_transformers
from syringa.engine.models.hf.check import unsupported_reason
from syringa.engine.processes import eviction
from syringa.engine.processes.memory import MemoryPlanner, replica_threads
from syringa.engine.processes.nvml import gpu_memories
from syringa.engine.vllm.launch import check_interpreter
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ModelError
from syringa.modelfiles.catalog import CATALOG, CONTEXT_SHOWN, CatalogModel
from syringa.modelfiles.gguf_config import check_architecture
from syringa.modelfiles.preview import Preview


def plan_model(spec: ModelSpec, config: Config, replicas: int = 1) -> MemoryPlan | None:
    """Plan the memory of a model that is loaded now. None on a GPU whose memory is not known, and for vLLM.

    Raise `StartupError` with one line if it does not fit on the CPU, or its weights do not on the GPU.
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
    return _plan_on_gpu(size, options, planner)


def _plan_on_gpu(size: ModelSize, options: WorkerOptions, planner: MemoryPlanner) -> MemoryPlan | None:
    """Plan the memory of a model on the GPU that its worker will get. None if its memory is not known."""
    gpus = gpu_memories()
    if not gpus:
        return None
    gpu = gpus[planner.choose_gpus([])[0]]
    return plan_gpu_memory(
        size,
        MemorySettings.of(options),
        gpu.free,
        gpu.total,
        overhead=eviction.GPU_OVERHEAD,
        fraction=planner.gpu_fraction(options, []),
        cores=available_cores(),
    )


def check_catalog_model(entry: CatalogModel, spec: ModelSpec, config: Config) -> None:
    """Raise `StartupError` with one line if a model of the catalog, whose files are not here yet, cannot run here."""
    options = WorkerOptions.from_config(spec, config)
    if options.engine == "vllm":
        return
    planner = MemoryPlanner(config, available_memory, gpu_memories)
    _check_memory(estimate_model_size(entry), options, planner)


def check_preview(preview: Preview, spec: ModelSpec, config: Config) -> None:
    """Like `check_catalog_model`, for another model on the Hub: raise also if its architecture does not run."""
    options = WorkerOptions.from_config(spec, config)
    if options.engine == "vllm":
        return
    planner = MemoryPlanner(config, available_memory, gpu_memories)
    if preview.folder is None:
        native = True
        if preview.metadata.get("general.architecture"):  # else the beginning of the file did not tell
            architecture = check_architecture(preview.metadata, preview.model)
            native = is_native({"model_type": architecture.model_type})
        if not native:
            check_transformers(preview.model)
        size = estimate_gguf(preview, native=native, max_model_len=options.max_model_len or CONTEXT_SHOWN)
    else:
        description, size = read_folder(preview)
        embedding = modelfiles.read_embedding_spec(preview.folder) is not None
        if not (size.native if embedding else is_native(description.config)):
            check_transformers(preview.model)
            if not embedding and (reason := unsupported_reason(preview.folder.path)):
                raise ModelError(f"{preview.model}: {reason}")
    _check_memory(size, options, planner)


def _check_memory(size: ModelSize, options: WorkerOptions, planner: MemoryPlanner) -> None:
    """Raise `StartupError` with one line if a model, whose files are not here yet, does not fit."""
    # The file says which context is too long.
    size = msgspec.structs.replace(size, max_model_len=max(size.max_model_len, options.max_model_len))
    if planner.expected_device(options) == "cuda":
        _plan_on_gpu(size, options, planner)
        return
    if options.dtype == "fp8":
        return
    free, kernels = available_memory(), kernel_variant()
    plan_memory(size, MemorySettings.of(options), free=free, kernels=kernels, cores=available_cores())


class CatalogNeed(msgspec.Struct, frozen=True):
    """What a model of the catalog takes of this machine's memory with `--dtype auto`."""

    memory: int  # of the weights and a cache of `CONTEXT_SHOWN` tokens
    fits: bool


class CatalogNeeds(msgspec.Struct, frozen=True):
    """What the models of the catalog take of the device that they would run on, by their names."""

    device: eviction.Device
    free: int  # bytes
    models: dict[str, CatalogNeed]


def catalog_needs(config: Config) -> CatalogNeeds:
    """Return what each model of the catalog takes of the free memory of this machine, or of its GPU."""
    planner, gpus = MemoryPlanner(config, available_memory, gpu_memories), gpu_memories()
    options = WorkerOptions.from_config(ModelSpec(id="", path="", device=config.device), config)
    if gpus and planner.expected_device(options) == "cuda":
        gpu = gpus[planner.choose_gpus([])[0]]
        usable = int(gpu.free - GPU_MARGIN * gpu.total) - eviction.GPU_OVERHEAD
        needs = {entry.name: catalog_gpu_memory(entry, estimate_model_size(entry)) for entry in CATALOG}
        return CatalogNeeds("cuda", gpu.free, {name: CatalogNeed(need, need <= usable) for name, need in needs.items()})
    free, kernels = available_memory(), kernel_variant()
    models = {}
    for entry in CATALOG:
        size = estimate_model_size(entry)
        dtype = choose_dtype(size, "auto", kernels)
        memory = size.weights[dtype] + size.cache_bytes(dtype) * min(entry.context, CONTEXT_SHOWN)
        models[entry.name] = CatalogNeed(memory, memory + PROGRAM_BYTES <= free)
    return CatalogNeeds("cpu", free, models)
