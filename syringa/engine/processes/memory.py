"""Free memory of the devices, how much of it a model needs and may use, and which GPU and threads a worker gets."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from syringa.config import Config, model_specs
from syringa.engine.cpu.features import available_cores
from syringa.engine.cpu.native import kernel_variant
from syringa.engine.loading.gpu_size import GPU_BYTES_PER_WEIGHT
from syringa.engine.loading.memory_plan import PROGRAM_BYTES, MemorySettings, least_memory, plan_memory
from syringa.engine.loading.model_size import read_size
from syringa.engine.loading.precision import choose_dtype
from syringa.engine.processes import eviction
from syringa.engine.processes.control import worker_key
from syringa.engine.processes.handle import WorkerHandle
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.vllm.memory import cpu_bytes, gpu_bytes, weight_bytes
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError, ModelError
from syringa.modelfiles import forget_gguf


class MemoryPlanner:
    def __init__(self, config: Config, host: Callable[[], int], gpus: Callable[[], Sequence[GpuMemory]]) -> None:
        self._config, self._host, self._gpus = config, host, gpus

    def free(self, device: eviction.Device, gpu: int = 0) -> int:
        """Return free bytes. Where those of the GPU are unknown, return the host's: the worker checks them itself."""
        found = self._gpu(gpu) if device == "cuda" else None
        return found.free if found else self._host()

    def expected_device(self, options: WorkerOptions) -> eviction.Device:
        """Return the device that a worker will probably choose. A loaded worker reports it."""
        if options.device == "auto" and options.engine == "vllm":
            return "cuda" if self._gpus() else "cpu"
        if options.device == "auto" and options.dtype not in ("int8", "gguf", "fp32"):
            return "cuda" if any(gpu.usable for gpu in self._gpus()) else "cpu"
        return "cuda" if options.device == "cuda" else "cpu"

    def choose_gpus(self, used: Sequence[int], count: int = 1) -> tuple[int, ...]:
        """Return the GPU with the fewest workers, and of those the one with the most free memory.

        `used` has the GPUs of each running worker. With a `count`, it is a group of so many GPUs. Groups do not
        overlap: the first begins with the first GPU, and each other one after another. Too few GPUs: all of them.
        """
        gpus = self._gpus()
        groups = [tuple(range(first, first + count)) for first in range(0, len(gpus) - count + 1, count)]
        return min(
            groups,
            key=lambda group: (sum(used.count(each) for each in group), -min(gpus[each].free for each in group)),
            default=tuple(range(len(gpus))) or (0,),
        )

    def gpu_names(self, chosen: Sequence[int]) -> str:
        """Return the names of GPUs for CUDA_VISIBLE_DEVICES; empty if there is no choice."""
        gpus = self._gpus()
        return "" if len(gpus) <= len(chosen) else ",".join(gpus[each].name for each in chosen)

    def gpu_fraction(
        self, options: WorkerOptions, known: Iterable[tuple[WorkerOptions, eviction.Device, int]]
    ) -> float:
        """Return the fraction of a GPU's memory that a worker may use.

        This is the configured fraction, or one that leaves room for the configured and `known` models, each with its
        number of replicas, that may be loaded on the same GPU at the same time.
        """
        gpus = self._gpus()
        if options.gpu_memory_fraction or not gpus:
            return options.gpu_memory_fraction or 1.0
        specs = model_specs(self._config)
        configured = [(WorkerOptions.from_config(spec, self._config), spec.replicas.max) for spec in specs]
        others = {worker_key(each): (each, self.expected_device(each), count) for each, count in configured}
        others |= {worker_key(each): (each, device, count) for each, device, count in known}
        _, _, own_replicas = others.pop(worker_key(options), (options, "cuda", 1))
        own = memory_needs(options)["cuda"]
        models = [(memory_needs(each)["cuda"], count) for each, device, count in others.values() if device == "cuda"]
        limit = self._config.max_loaded
        models = sorted(models, reverse=True)[: limit - 1 if limit else None]
        needs = [own] * (own_replicas - 1) + [need for need, count in models for _ in range(count)]
        neighbors = sorted(needs, reverse=True)[: math.ceil((len(needs) + 1) / len(gpus)) - 1]
        return eviction.gpu_memory_share(own, neighbors, total=gpus[0].total)

    def gpu_bytes(self, fraction: float, gpu: int = 0) -> int:
        """Return a fraction of a GPU's memory in bytes."""
        found = self._gpu(gpu)
        return int(fraction * found.total) if found else 0

    def _gpu(self, gpu: int) -> GpuMemory | None:
        gpus = self._gpus()
        return gpus[gpu] if gpu < len(gpus) else None


def place(
    worker: WorkerHandle,
    running: Sequence[WorkerHandle],
    memory: MemoryPlanner,
    *,
    now: float,
    max_loaded: int,
    evict_busy: bool,
) -> tuple[eviction.LoadDecision, int]:
    """Choose the GPUs of a replica that is to be loaded. Return what must happen before, and the free bytes there."""
    device = worker.memory_device
    used = [gpu for each in running if each.device == "cuda" for gpu in each.gpus]
    worker.gpus = memory.choose_gpus(used, worker.model.options.gpus) if device == "cuda" else (0,)
    resident = [  # one on several GPUs is there once for each of them
        each.resident_model(now, memory.free(each.device, gpu), gpu)
        for each in running
        for gpu in (each.gpus if each.device == "cuda" else (0,))
    ]
    free = {gpu: memory.free(device, gpu) for gpu in worker.gpus}
    decisions = [
        eviction.decide_load(
            worker.model.pending_model(device, gpu),
            resident,
            free=free[gpu],
            max_loaded=max_loaded,
            evict_busy=evict_busy,
        )
        for gpu in worker.gpus
    ]
    return eviction.strictest(decisions), min(free.values())


def launch_options(worker: WorkerHandle, memory: MemoryPlanner, known: Sequence[WorkerHandle]) -> WorkerOptions:
    """Return the options of a replica's process. `known`: the replicas that may share its GPU."""
    model = worker.model
    threads = replica_threads(model.options.threads, model.max_replicas)
    options = msgspec.structs.replace(model.options, socket=worker.socket, threads=threads)
    if options.engine == "vllm":
        worker.expected_gpu_bytes = gpu_bytes(options, memory.gpu_bytes(1.0, worker.gpus[0]))
        return msgspec.structs.replace(options, gpu=memory.gpu_names(worker.gpus))
    if worker.device != "cuda":
        free, model.planned_free = model.planned_free or worker.spare_at_start, 0
        others = any(each is not worker and each.process is not None for each in model.replicas)
        if others and model.info is not None and not options.kv_cache_tokens and not options.kv_cache_gb:
            # With less memory, its context would be shorter than that of the others.
            options = msgspec.structs.replace(options, kv_cache_tokens=model.info.max_model_len)
        options = msgspec.structs.replace(options, free_memory=max(1, free))  # 0: not known
        worker.planned_bytes = planned_memory(options)
        return options
    fraction = memory.gpu_fraction(
        model.options, [(each.model.options, each.device, each.model.max_replicas) for each in known]
    )
    worker.expected_gpu_bytes = memory.gpu_bytes(fraction, worker.gpus[0])
    return msgspec.structs.replace(options, gpu_memory_fraction=fraction, gpu=memory.gpu_names(worker.gpus))


def replica_threads(threads: int, replicas: int) -> int:
    """Return the threads of one of several replicas of a model; 0: chosen for the machine."""
    return threads if replicas <= 1 else max(1, (threads or available_cores()) // replicas)


def planned_memory(options: WorkerOptions) -> int:
    """Return the bytes that a worker will take on a CPU, with all of its cache; 0 if its files cannot be read."""
    size = read_size(options.model)
    forget_gguf()
    with contextlib.suppress(ConfigError, ModelError):  # it does not fit: its worker says so
        if size is not None:
            plan = plan_memory(
                size,
                MemorySettings.of(options),
                free=options.free_memory,
                kernels=kernel_variant(),
                cores=available_cores(),
            )
            return plan.total
    return 0


def memory_needs(options: WorkerOptions) -> Mapping[eviction.Device, int]:
    """Return the bytes that a model will need on each device, from its files; little if they cannot be read."""
    if options.engine == "vllm":
        return {"cpu": cpu_bytes(options), "cuda": weight_bytes(options.model) // options.gpus + eviction.GPU_OVERHEAD}
    size = read_size(options.model)
    forget_gguf()  # the supervisor does not need it again
    if size is None:
        return {"cpu": PROGRAM_BYTES, "cuda": eviction.GPU_OVERHEAD}
    settings, on_cpu = MemorySettings.of(options), PROGRAM_BYTES
    with contextlib.suppress(ConfigError):  # a dtype that is not for CPUs, or not for this model
        on_cpu = least_memory(size, settings, choose_dtype(size, options.dtype, kernel_variant()))
    on_gpu = size.gpu_weights(options.dtype if options.dtype in GPU_BYTES_PER_WEIGHT else "auto")
    return {"cpu": on_cpu, "cuda": eviction.estimate_gpu_memory(on_gpu)}
