"""Loading the model of a worker, with progress bars on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from syringa.engine.client import protocol
from syringa.engine.cpu.features import release_memory
from syringa.engine.worker.options import WorkerOptions

if TYPE_CHECKING:
    from syringa.engine.worker.core import EngineCore

CPU_STEP_TOKENS, GPU_STEP_TOKENS = 512, 8192


def load_engine(
    options: WorkerOptions, on_progress: Callable[[], None] = lambda: None
) -> tuple[EngineCore, protocol.Ready]:
    """Load the model and return its engine with the worker's `Ready` message. Raises `StartupError`.

    `on_progress` is called with each part that is done.
    """
    from syringa.engine.loading.loader import LoadOptions, load_model
    from syringa.engine.scheduling.limits import ATTENTION_SPAN, GPU_ATTENTION_SPAN, SchedulerLimits
    from syringa.engine.worker.core import EngineCore
    from syringa.modelfiles import load_tokenizer, locate

    load_options = LoadOptions(
        model=options.model,
        dtype=options.dtype,
        threads=options.threads,
        max_model_len=options.max_model_len,
        device=options.device,
        attention=options.attention,
        deterministic=options.deterministic,
    )
    with progress_bar("Reading weights", on_progress) as advance:
        loaded = load_model(load_options, advance)
    limits = SchedulerLimits(
        options.step_tokens or (GPU_STEP_TOKENS if loaded.gpu else CPU_STEP_TOKENS),
        options.max_running,
        options.max_queue,
        options.queue_timeout,
        GPU_ATTENTION_SPAN if loaded.gpu else ATTENTION_SPAN,
        options.gpu_memory_fraction,
    )
    on_progress()
    with progress_bar("Recording CUDA graphs", on_progress) as advance:
        core = EngineCore(
            loaded,
            limits,
            kv_cache_tokens=options.kv_cache_tokens,
            kv_cache_gb=options.kv_cache_gb,
            prefix_caching=options.prefix_caching,
            tokenizer_json=lambda: load_tokenizer(locate(options.model)).to_str(),
            progress=advance,
        )
    release_memory()
    info = msgspec.structs.replace(loaded.info, max_model_len=core.max_length)
    if loaded.device.type != "cuda":
        return core, protocol.Ready(info)
    from syringa.engine.gpu.device import used_gpu_memory

    return core, protocol.Ready(info, "cuda", used_gpu_memory(loaded.device))


@contextlib.contextmanager
def progress_bar(label: str, on_progress: Callable[[], None]) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar from the first call of the yielded function; nothing if standard error is no terminal.

    `on_progress` is called with each call of that function.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = TextColumn(label), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)

        def advance(done: int, total: int) -> None:
            on_progress()
            bar.update(task, completed=done, total=total, visible=True)

        yield advance
