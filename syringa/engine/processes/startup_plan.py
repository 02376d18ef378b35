"""What will happen when a model is loaded now, for the command line, which prints it, or why the model cannot fit."""

from __future__ import annotations

import msgspec

from syringa import modelfiles
from syringa.config import Config, ModelSpec
from syringa.engine.cpu.features import available_cores, available_memory
from syringa.engine.cpu.native import kernel_variant
from syringa.engine.loading.memory_plan import PROGRAM_BYTES, MemorySettings, plan_gpu_memory, plan_memory
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
    device = _expected_device(options, config)
    _check_memory(estimate_model_size(entry), options, device)


def check_preview(preview: Preview, spec: ModelSpec, config: Config) -> None:
    """Like `check_catalog_model`, for another model on the Hub: raise also if its architecture does not run."""
    options = WorkerOptions.from_config(spec, config)
    if options.engine == "vllm":
        return
    device = _expected_device(options, config)
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
    _check_memory(size, options, device)


def _expected_device(options: WorkerOptions, config: Config) -> eviction.Device:
    return MemoryPlanner(config, available_memory, gpu_memories).expected_device(options)


def _check_memory(size: ModelSize, options: WorkerOptions, device: eviction.Device) -> None:
    """Raise `StartupError` with one line if a model, whose files are not here yet, does not fit on the CPU."""
    if device == "cuda" or options.dtype == "fp8":
        return
    # The file says which context is too long.
    size = msgspec.structs.replace(size, max_model_len=max(size.max_model_len, options.max_model_len))
    free, kernels = available_memory(), kernel_variant()
    plan_memory(size, MemorySettings.of(options), free=free, kernels=kernels, cores=available_cores())


class CatalogNeed(msgspec.Struct, frozen=True):
    """What a model of the catalog takes of this machine's memory with `--dtype auto`."""

    memory: int  # of the weights and a cache of `CONTEXT_SHOWN` tokens
    fits: bool


def catalog_needs() -> tuple[int, dict[str, CatalogNeed]]:
    """Return the free bytes of this machine, and what each model of the catalog takes of them, by its name."""
    free, kernels = available_memory(), kernel_variant()
    needs = {}
    for entry in CATALOG:
        size = estimate_model_size(entry)
        dtype = choose_dtype(size, "auto", kernels)
        memory = size.weights[dtype] + size.cache_bytes(dtype) * min(entry.context, CONTEXT_SHOWN)
        needs[entry.name] = CatalogNeed(memory, memory + PROGRAM_BYTES <= free)
    return free, needs
