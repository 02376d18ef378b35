"""The process of a worker on vLLM, which `bootstrap.py` has begun.

It is the server of `engine/worker/server.py` with another engine: one thread receives and sends, and another one runs
the event loop of vLLM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from syringa import logs
from syringa.engine.client import protocol
from syringa.engine.cpu.features import disable_broken_amx
from syringa.engine.processes import managed_process
from syringa.engine.processes.managed_process import EXIT_NO_GPU_MEMORY, EXIT_NO_MEMORY
from syringa.engine.structured_output.grammar_tokenizer import rename_special_tokens
from syringa.engine.vllm.arguments import check_device, engine_arguments, set_environment
from syringa.engine.vllm.engine import Generate, VllmEngine, VllmLimits
from syringa.engine.vllm.memory import gpu_bytes
from syringa.engine.vllm.orphans import guard_children
from syringa.engine.vllm.process_output import ProcessOutput
from syringa.engine.vllm.requests import ChoiceRequest
from syringa.engine.vllm.stats import VllmCounters
from syringa.engine.worker.fingerprint import worker_fingerprint
from syringa.engine.worker.options import WorkerOptions
from syringa.engine.worker.server import WorkerServer, exit_status, open_listeners, report_health
from syringa.errors import ConfigError, EngineOverloaded, InvalidRequest, StartupError, SyringaError
from syringa.modelfiles import ModelFiles, count_weights, locate
from syringa.types import ModelInfo

logger = logging.getLogger("syringa.worker")

TESTED = "0.32."  # the versions of vLLM that the worker was tested with
CHECK_SECONDS = 0.5  # interval at which the processes of vLLM are checked
EXIT_FAILED = 1  # of vLLM, for a reason that may pass
MAX_REASON = 400  # characters

_NO_CAUSE = "root cause"  # in exceptions of vLLM that refer to what another process has printed
_KILLED = re.compile(r"'\w+': -9")
_OUT_OF_MEMORY = re.compile(
    r"out of memory|less than desired GPU memory|(?P<host>MemoryError|can't allocate memory|Cannot allocate memory)"
)
_SECRET = re.compile(r"(^|_)(token|key|secret|password)$")  # names of engine arguments
_PARAMETER = re.compile(r" \(parameter=.*\)$")  # which vLLM adds to messages
# Of pydantic: the beginning of an error, and what it adds to the message.
_PYDANTIC = re.compile(r"^\d+ validation errors? for \w+ (Value error, )?| \[type=.*$")


class VllmServer(WorkerServer):
    """The server of a worker on vLLM. A step is one of vLLM's: it lasts while requests are computed."""

    core: VllmEngine

    def _begin_wait(self, delay: float | None) -> None:
        if not self.core.active:
            self.health.end_step()
        elif self.core.take_progress():
            self.health.begin_step()

    def _end_wait(self) -> None:
        """A message of a client is no progress of vLLM."""


class LoadedEngine:
    """vLLM's `AsyncLLM` in a thread with an event loop."""

    def __init__(self, arguments: dict[str, Any], where: str, die: Callable[[], None]) -> None:
        """Load the model. Raises `ConfigError` for arguments that vLLM refuses, and what vLLM raises.

        `where`: the model, for messages. `die` is called when the processes of vLLM have ended.
        """
        self._where, self._die = where, die
        self.counters = VllmCounters()
        self.loop = asyncio.new_event_loop()
        self.on_step: Callable[[], None] = lambda: None  # called in the event loop
        self._closing = False
        threading.Thread(target=self.loop.run_forever, daemon=True, name="vllm").start()
        self.llm: Any = asyncio.run_coroutine_threadsafe(self._load(arguments), self.loop).result()
        asyncio.run_coroutine_threadsafe(self._watch(), self.loop)

    def close(self) -> None:
        self._closing = True
        self.llm.shutdown()

    async def _load(self, arguments: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        try:
            config = AsyncEngineArgs(**arguments).create_engine_config()
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"vLLM refuses the settings of {self._where}: {_one_line(error)}") from error
        return AsyncLLM.from_vllm_config(config, stat_loggers=[self._make_stat_logger()], disable_log_stats=True)

    def _make_stat_logger(self) -> Any:
        from vllm.v1.metrics.loggers import StatLoggerBase

        engine = self

        class StepRecorder(StatLoggerBase):  # type: ignore[misc] # vLLM is not installed where types are checked
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
                engine.counters.record_step(scheduler_stats, iteration_stats)
                engine.on_step()

            def log_engine_initialized(self) -> None:
                pass

        return StepRecorder

    async def _watch(self) -> None:
        while not self.llm.errored:  # noqa: ASYNC110 - vLLM has no event for it
            await asyncio.sleep(CHECK_SECONDS)
        if not self._closing:
            self._die()

    def generate(self) -> Generate:
        """Return the function that runs one choice of a request."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
        from vllm.v1.engine.exceptions import EngineDeadError

        llm = self.llm

        async def generate(choice: ChoiceRequest, id: str, priority: int) -> AsyncGenerator[Any]:
            structured = choice.structured_outputs
            params = SamplingParams(
                **choice.sampling,
                output_kind=RequestOutputKind.DELTA,
                structured_outputs=StructuredOutputsParams(**structured) if structured is not None else None,
            )
            if choice.bad_words:
                # vLLM has no public field for words that are tokenized already.
                params._bad_words_token_ids = choice.bad_words
            prompt = tokens_input(choice.prompt, cache_salt=choice.cache_salt)
            try:
                async for output in llm.generate(prompt, params, id, priority=priority):
                    yield output
            except EngineDeadError:
                if not self._closing:
                    self._die()

        return generate


def load_engine(options: WorkerOptions, die: Callable[[], None]) -> tuple[VllmEngine, protocol.Ready, LoadedEngine]:
    """Load the model and return its engine with the worker's `Ready` message. Raises `StartupError`.

    `die`: see `LoadedEngine`.
    """
    started = time.monotonic()
    try:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ConfigError(f"vLLM cannot be imported by {sys.executable}: {_one_line(error)}") from error
    if not vllm.__version__.startswith(TESTED):
        logger.warning("worker: this version of vLLM was not tested: version=%s tested=%sx", vllm.__version__, TESTED)
    check_device(options.device, current_platform.device_type)
    files = locate(options.model)
    known = [field.name for field in dataclasses.fields(AsyncEngineArgs)]
    where = f"{options.model} (engine_args {_shown(options.engine_args)})" if options.engine_args else options.model
    loaded = LoadedEngine(engine_arguments(options, files, known, device=current_platform.device_type), where, die)
    config = loaded.llm.vllm_config
    model, cache = config.model_config, config.cache_config
    info = ModelInfo(
        architecture=str(model.architecture),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        parameters=count_weights(files),
        kernels=f"vllm {vllm.__version__}",
        threads=options.threads,
        load_seconds=time.monotonic() - started,
    )
    limits = VllmLimits(
        vocab_size=info.vocab_size,
        max_length=info.max_model_len,
        max_running=config.scheduler_config.max_num_seqs,
        max_queue=options.max_queue,
        queue_seconds=options.queue_timeout,
        blocks=cache.num_gpu_blocks or 0,
        block_size=cache.block_size or 0,
        prefix_caching=bool(cache.enable_prefix_caching),
    )
    engine = VllmEngine(
        loaded.loop,
        loaded.generate(),
        limits,
        special_tokens=_special_tokens(files),
        counters=loaded.counters,
        to_error=_to_error,
    )
    loaded.on_step = engine.wake_soon
    return engine, _ready(options, files, info, current_platform), loaded


def _ready(options: WorkerOptions, files: ModelFiles, info: ModelInfo, platform: Any) -> protocol.Ready:
    on_gpu = platform.device_type == "cuda"
    name = platform.get_device_name() if on_gpu else "cpu"
    settings = msgspec.structs.replace(info, kernels=f"{info.kernels} {_json(options.engine_args)}")
    fingerprint = worker_fingerprint(
        files, settings, device=name, torch_version=version("torch"), cache_dtype=options.kv_cache_dtype
    )
    memory = gpu_bytes(options, platform.get_device_total_memory()) if on_gpu else 0
    return protocol.Ready(info, "cuda" if on_gpu else "cpu", memory, fingerprint)


def _shown(engine_args: dict[str, Any]) -> str:
    """Return engine arguments for a message, without secrets such as `hf_token`."""
    return _json({name: "***" if _SECRET.search(name) else value for name, value in engine_args.items()})


def _json(value: dict[str, Any]) -> str:
    return msgspec.json.encode(value, order="deterministic").decode()


def _special_tokens(files: ModelFiles) -> dict[str, int]:
    return rename_special_tokens((Path(files.path) / "tokenizer.json").read_text(encoding="utf-8"))[1]


def _to_error(error: Exception) -> SyringaError | None:
    """Return what the client is told of an exception of vLLM; None if the client is not at fault."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError

    if isinstance(error, GracefulHTTPError):
        return EngineOverloaded(str(error))
    if isinstance(error, VLLMClientError | ValueError):
        message = _PARAMETER.sub("", str(error))
        return InvalidRequest(f"vLLM refuses the request: {message}", param=getattr(error, "parameter", None))
    return None


def _one_line(error: Exception) -> str:
    return _shorten(_PYDANTIC.sub("", " ".join(str(error).split())) or type(error).__name__)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_REASON else text[:MAX_REASON] + " …"


def _die(output: ProcessOutput) -> None:
    """End the worker: the processes of vLLM have ended. The supervisor starts another one."""
    output.settle()
    logger.error("worker: vLLM has ended unexpectedly")
    logging.shutdown()
    os._exit(EXIT_FAILED)


def _load_failure(error: Exception, output: ProcessOutput) -> tuple[str, int]:
    """Return in one line why vLLM could not load the model, and the exit status.

    Of a process that has failed, vLLM's exception in this one says no more than that.
    """
    reason = _one_line(error)
    if _NO_CAUSE in reason:
        output.settle()
        if found := output.first_exception():
            reason = _shorten(found)
        elif _KILLED.search(reason):
            return "a process of it was killed, perhaps out of memory", EXIT_NO_MEMORY
        else:
            output.pass_on(held=True)
    if short := _OUT_OF_MEMORY.search(reason):
        return reason, EXIT_NO_MEMORY if short["host"] else EXIT_NO_GPU_MEMORY
    return reason, EXIT_FAILED


def main() -> None:
    guard_children()
    options = managed_process.attach_to_parent(WorkerOptions)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the supervisor stops them in order
    logs.configure(options.log_level, options.log_format)
    logging.logProcesses = True  # vLLM's lines have the id of the process
    disable_broken_amx(options.dtype)
    output = ProcessOutput(hold=options.log_level != "debug" and "VLLM_LOGGING_LEVEL" not in os.environ)
    set_environment(options)
    health = report_health(options)
    try:
        listeners = open_listeners(options)
        engine, ready, loaded = load_engine(options, functools.partial(_die, output))
    except StartupError as error:
        managed_process.exit_with_reason(error.message, exit_status(error), options.reason_file)
    except Exception as error:
        logger.debug("worker: vLLM cannot load the model", exc_info=True)
        reason, status = _load_failure(error, output)
        managed_process.exit_with_reason(f"vLLM cannot load {options.model}: {reason}", status, options.reason_file)
    output.pass_on()
    server = VllmServer(engine, ready, listeners, health)

    def stop(*_: object) -> None:
        server.stopping = True
        server.wake()

    signal.signal(signal.SIGTERM, stop)
    server.run()
    loaded.close()
