"""The options of a model worker, which its parent process sends it at the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from syringa.cluster.folder import ClusterFolder
from syringa.cluster.tls import TlsFiles
from syringa.config import Config, ModelSpec
from syringa.config.engines import parallel_gpus
from syringa.config.specs import EngineName
from syringa.engine.client.transport import Address

# What has no setting of its name.
PER_PROCESS = ("socket", "model", "health_fd", "progress_bar", "gpu", "listen", "tls", "free_memory")


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The part of `Config` and `ModelSpec` that concerns a worker, and the path of its socket."""

    socket: str
    model: str
    engine: EngineName = "syringa"
    python: str = ""  # of vLLM's environment; empty: that of the server
    engine_args: dict[str, Any] = {}  # of vLLM
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    deterministic: bool = False
    threads: int = 0
    max_model_len: int = 0
    kv_cache_tokens: int = 0
    kv_cache_gb: float = 0.0
    kv_cache_dtype: str = "auto"
    gpu_memory_fraction: float = 0.0
    prefix_caching: bool = True
    max_running: int = 256
    max_queue: int = 1024
    queue_timeout: float = 0.0
    step_tokens: int = 0  # 0: depends on the device
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    health_fd: int = -1  # file descriptor of the health page; -1: without a supervisor
    progress_bar: bool = True  # show on a terminal how far loading is
    gpu: str = ""  # the GPU to use, a value of CUDA_VISIBLE_DEVICES; empty: the first that is visible
    listen: str = ""  # address for clients of other machines, "tcp:HOST:PORT"; port 0: one that is free
    tls: TlsFiles | None = None  # certificate and key of this node, which `listen` needs
    free_memory: int = 0  # bytes that were free on the host before the worker was started; 0: not measured

    @classmethod
    def from_config(cls, spec: ModelSpec, config: Config, socket: str = "") -> WorkerOptions:
        """Return the options of a model: its own settings where it has them, and the server's for the rest."""
        names = [name for name in cls.__struct_fields__ if name not in PER_PROCESS]
        settings = {name: getattr(spec if hasattr(spec, name) else config, name) for name in names}
        if config.worker_host:
            settings["listen"] = str(Address("tcp", config.worker_host))
            settings["tls"] = ClusterFolder(Path(config.cluster_dir)).files("server")
        return cls(socket=socket, model=spec.path, **settings)

    @property
    def inherited_fds(self) -> tuple[int, ...]:
        """The open file descriptors that a worker gets from its parent."""
        return (self.health_fd,) if self.health_fd >= 0 else ()

    @property
    def gpus(self) -> int:
        """The number of GPUs that a replica uses, where it runs on GPUs."""
        return parallel_gpus(self.engine_args) if self.engine == "vllm" else 1

    @property
    def reason_file(self) -> str:
        """Path of the file in which a worker that cannot load its model leaves the reason."""
        return self.socket + ".reason"
