"""What is free where models are computed, and how much of it one may take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from syringa import modelfiles
from syringa.config import Config, model_specs
from syringa.engine.models.config import is_native
from syringa.engine.processes import eviction
from syringa.engine.processes.control import key_of
from syringa.engine.processes.nvml import GpuMemory
from syringa.engine.worker.server import WorkerOptions
from syringa.errors import SyringaError


class Memory:
    def __init__(self, config: Config, host: Callable[[], int], gpu: Callable[[], GpuMemory | None]) -> None:
        self._config, self._host, self._gpu = config, host, gpu

    def free(self, device: eviction.Device) -> int:
        """Bytes. Of a GPU of which nothing is known, the machine's have to do: whoever tries finds out."""
        gpu = self._gpu() if device == "cuda" else None
        return gpu.free if gpu else self._host()

    def guess(self, options: WorkerOptions) -> eviction.Device:
        """Where a worker will compute. Once it does, it says so itself."""
        if options.device == "auto" and options.dtype not in ("int8", "fp32"):
            return "cuda" if self._gpu() else "cpu"
        return "cuda" if options.device == "cuda" else "cpu"

    def fraction(self, options: WorkerOptions, known: Iterable[tuple[WorkerOptions, eviction.Device]]) -> float:
        """Which part of the GPU's memory a worker may take: as was set, or so that those fit that are configured or
        `known`, as many as may be loaded with it."""
        gpu = self._gpu()
        if options.gpu_memory_fraction or gpu is None:
            return options.gpu_memory_fraction or 1.0
        configured = [WorkerOptions.of(spec, self._config) for spec in model_specs(self._config)]
        rivals = {key_of(each): (each, self.guess(each)) for each in configured}
        rivals |= {key_of(each): (each, device) for each, device in known}
        rivals.pop(key_of(options), None)
        others = [needs(each)["cuda"] for each, device in rivals.values() if device == "cuda"]
        return eviction.share(needs(options)["cuda"], others, total=gpu.total, most=self._config.max_loaded)

    def expected(self, fraction: float) -> int:
        """Bytes that a worker with this part of the GPU will take."""
        gpu = self._gpu()
        return int(fraction * gpu.total) if gpu else 0


def needs(options: WorkerOptions) -> Mapping[eviction.Device, int]:
    """Bytes that a model will take, going by its files: where it computes on a CPU, and where on a GPU."""
    count, native = _weights(options.model)
    on_cpu = eviction.estimate(count, options.dtype, "cpu", least=1 if native else 2)  # those are read in bf16 first
    return {"cpu": on_cpu, "cuda": eviction.estimate(count, options.dtype, "cuda")}


def _weights(model: str) -> tuple[int, bool]:
    """How many a model has, and whether it runs natively. 0 where that cannot be known, and loading will tell: whatever
    lies in somebody's folder must not end the process that all models depend on."""
    try:
        files = modelfiles.locate(model)
        native = files.kind == "gguf" or is_native(modelfiles.read_json(Path(files.path) / "config.json"))
        return modelfiles.count_weights(files), native
    except (SyringaError, OSError, ValueError):
        return 0, True
