"""Free memory of the devices, and how much of it a model needs and may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from syringa import modelfiles
from syringa.config import Config, model_specs
from syringa.engine.models.config import is_native
from syringa.engine.models.quantization import stored_dtype
from syringa.engine.processes import eviction
from syringa.engine.processes.control import worker_key
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import SyringaError


class MemoryPlanner:
    def __init__(self, config: Config, host: Callable[[], int], gpu: Callable[[], GpuMemory | None]) -> None:
        self._config, self._host, self._gpu = config, host, gpu

    def free(self, device: eviction.Device) -> int:
        """Return free bytes. Where those of the GPU are unknown, return the host's: the worker checks them itself."""
        gpu = self._gpu() if device == "cuda" else None
        return gpu.free if gpu else self._host()

    def expected_device(self, options: WorkerOptions) -> eviction.Device:
        """Return the device that a worker will probably choose. A loaded worker reports it."""
        if options.device == "auto" and options.dtype not in ("int8", "gguf", "fp32"):
            return "cuda" if self._gpu() else "cpu"
        return "cuda" if options.device == "cuda" else "cpu"

    def gpu_fraction(self, options: WorkerOptions, known: Iterable[tuple[WorkerOptions, eviction.Device]]) -> float:
        """Return the fraction of the GPU's memory that a worker may use.

        This is the configured fraction, or one that leaves room for the configured and `known` models that may be
        loaded at the same time.
        """
        gpu = self._gpu()
        if options.gpu_memory_fraction or gpu is None:
            return options.gpu_memory_fraction or 1.0
        configured = [WorkerOptions.from_config(spec, self._config) for spec in model_specs(self._config)]
        others = {worker_key(each): (each, self.expected_device(each)) for each in configured}
        others |= {worker_key(each): (each, device) for each, device in known}
        others.pop(worker_key(options), None)
        needs = [memory_needs(each)["cuda"] for each, device in others.values() if device == "cuda"]
        own = memory_needs(options)["cuda"]
        return eviction.gpu_memory_share(own, needs, total=gpu.total, max_loaded=self._config.max_loaded)

    def gpu_bytes(self, fraction: float) -> int:
        """Return a fraction of the GPU's memory in bytes."""
        gpu = self._gpu()
        return int(fraction * gpu.total) if gpu else 0


def memory_needs(options: WorkerOptions) -> Mapping[eviction.Device, int]:
    """Return the bytes that a model will need on each device, estimated from its files."""
    count, native, stored = _count_weights(options.model)
    # Models on transformers' definitions are read in bf16 before they are quantized.
    on_cpu = eviction.estimate_memory(count, options.dtype, "cpu", min_bytes=1 if native else 2)
    on_gpu = stored if options.dtype == "auto" else options.dtype  # quantized folders stay so on a GPU
    return {"cpu": on_cpu, "cuda": eviction.estimate_memory(count, on_gpu, "cuda")}


def _count_weights(model: str) -> tuple[int, bool, str]:
    """Return the number of weights, whether the native decoder runs the model, and the dtype of its files on a GPU.

    0 if the files cannot be read: the worker reports why, and the supervisor must survive any file.
    """
    try:
        files = modelfiles.locate(model)
        if files.kind == "gguf":
            return modelfiles.count_weights(files), True, "bf16"
        config = modelfiles.read_json(Path(files.path) / "config.json")
        return modelfiles.count_weights(files), is_native(config), stored_dtype(config)
    except (SyringaError, OSError, ValueError):
        return 0, True, "bf16"
