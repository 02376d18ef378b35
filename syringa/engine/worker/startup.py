"""Loading the model of a worker, with progress bars on a terminal."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from syringa.engine.client import protocol
from syringa.engine.cpu.features import release_memory
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import SyringaError
from syringa.modelfiles import (
    EmbeddingSpec,
    ModelFiles,
    forget_gguf,
    load_tokenizer,
    locate,
    read_embedding_spec,
    read_gguf,
)
from syringa.types import LoadPhase

if TYPE_CHECKING:
    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.engine.worker.engine import WorkerEngine

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 8192
READ_AHEAD_BYTES = 1 << 20  # of one request: systems limit its size

ReportLoading = Callable[[LoadPhase, int, int], None]
"""Report a phase of loading: how many of its parts are done, and their number; 0: not known."""


def load_engine(
    options: WorkerOptions, report: ReportLoading = lambda phase, done, total: None
) -> tuple[WorkerEngine, protocol.Ready]:
    """Load the model and return its engine with the worker's `Ready` message. Raises `StartupError`.

    `report` is called when a phase begins, and with each part of it that is done.
    """
    # Importing torch takes a second.
    threading.Thread(target=read_ahead, args=(options.model,), daemon=True, name="read-ahead").start()

    import torch

    from syringa.engine.loading.loaded_model import LoadOptions
    from syringa.engine.loading.loader import load_model
    from syringa.engine.scheduling.limits import ATTENTION_SPAN, GPU_ATTENTION_SPAN, SchedulerLimits
    from syringa.engine.worker.core import EngineCore
    from syringa.engine.worker.fingerprint import worker_fingerprint

    load_options = LoadOptions(
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        max_model_len=options.max_model_len,
        device=options.device,
        attention=options.attention,
        deterministic=options.deterministic,
        kv_cache_tokens=options.kv_cache_tokens,
        kv_cache_gb=options.kv_cache_gb,
        kv_cache_dtype=options.kv_cache_dtype,
        max_running=options.max_running,
        free_memory=options.free_memory,
    )
    files = locate(options.model)
    if (spec := read_embedding_spec(files)) is not None:
        return _load_embedding_engine(options, load_options, files, spec, report)
    with loading_phase("weights", "Reading weights", report, bar=options.progress_bar) as advance:
        loaded = load_model(load_options, advance)
    limits = SchedulerLimits(
        options.step_tokens or (GPU_STEP_TOKENS if loaded.gpu else CPU_STEP_TOKENS),
        options.max_running,
        options.max_queue,
        options.queue_timeout,
        GPU_ATTENTION_SPAN if loaded.gpu else ATTENTION_SPAN,
        options.gpu_memory_fraction,
    )
    with loading_phase("warmup", "Recording CUDA graphs", report, bar=options.progress_bar) as advance:
        core = EngineCore(
            loaded,
            limits,
            kv_cache_tokens=options.kv_cache_tokens,
            kv_cache_gb=options.kv_cache_gb,
            prefix_caching=options.prefix_caching,
            tokenizer_json=lambda: _tokenizer_json(files),
            progress=advance,
        )
    forget_gguf()
    release_memory()
    info = msgspec.structs.replace(loaded.info, max_model_len=core.max_length)
    on_gpu = loaded.device.type == "cuda"
    name = torch.cuda.get_device_name(loaded.device) if on_gpu else "cpu"
    fingerprint = worker_fingerprint(
        files,
        info,
        device=name,
        torch_version=str(torch.__version__),
        cache_dtype=options.kv_cache_dtype,
    )
    if not on_gpu:
        return core, protocol.Ready(info, fingerprint=fingerprint)
    from syringa.engine.gpu.device import used_gpu_memory

    return core, protocol.Ready(info, "cuda", used_gpu_memory(loaded.device), fingerprint)


def _tokenizer_json(files: ModelFiles) -> str:
    """Return the model's tokenizer, when the first grammar needs it."""
    tokenizer = load_tokenizer(files).to_str()
    forget_gguf()
    return tokenizer


def _load_embedding_engine(
    options: WorkerOptions,
    load_options: LoadOptions,
    files: ModelFiles,
    spec: EmbeddingSpec,
    report: ReportLoading,
) -> tuple[WorkerEngine, protocol.Ready]:
    import torch

    from syringa.engine.embedding.engine import EmbeddingEngine
    from syringa.engine.embedding.loading import load_embedding_model
    from syringa.engine.scheduling.limits import SchedulerLimits
    from syringa.engine.worker.fingerprint import worker_fingerprint

    with loading_phase("weights", "Reading weights", report, bar=options.progress_bar) as advance:
        loaded = load_embedding_model(load_options, files, spec, advance)
    on_gpu = loaded.device.type == "cuda"
    step_tokens = options.step_tokens or (GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS)
    limits = SchedulerLimits(step_tokens, max_queue=options.max_queue, queue_seconds=options.queue_timeout)
    report("warmup", 0, 0)
    engine = EmbeddingEngine(loaded, limits)
    release_memory()
    name = torch.cuda.get_device_name(loaded.device) if on_gpu else "cpu"
    fingerprint = worker_fingerprint(files, loaded.info, device=name, torch_version=str(torch.__version__))
    if not on_gpu:
        return engine, protocol.Ready(loaded.info, fingerprint=fingerprint)
    from syringa.engine.gpu.device import used_gpu_memory

    return engine, protocol.Ready(loaded.info, "cuda", used_gpu_memory(loaded.device), fingerprint)


def read_ahead(model: str) -> None:
    """Request that the system reads the weights of a model into its page cache, as far as they are not there."""
    with contextlib.suppress(SyringaError, OSError, AttributeError):  # `load_model` reports errors; not on macOS
        files = locate(model)
        if files.kind == "gguf":
            parts = sorted({tensor.file for tensor in read_gguf(files.path).tensors.values()})
        else:
            parts = sorted(str(path) for path in Path(files.path).glob("*.safetensors"))
        for part in parts:
            with open(part, "rb") as file:
                for offset in range(0, os.fstat(file.fileno()).st_size, READ_AHEAD_BYTES):
                    os.posix_fadvise(file.fileno(), offset, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)


@contextlib.contextmanager
def loading_phase(
    phase: LoadPhase, label: str, report: ReportLoading, *, bar: bool
) -> Iterator[Callable[[int, int], None]]:
    """Begin a phase of loading, whose progress is reported with the yielded function.

    With `bar`, it is shown from the first call of that function on, if standard error is a terminal.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    report(phase, 0, 0)
    console = Console(stderr=True)
    columns = TextColumn(label), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not (bar and console.is_terminal)) as shown:
        task = shown.add_task("", total=None, visible=False)

        def advance(done: int, total: int) -> None:
            report(phase, done, total)
            shown.update(task, completed=done, total=total, visible=True)

        yield advance
