"""A stand-in for vLLM, with the parts of it that the worker uses.

It answers with the tokens of the prompt, one per step. Prompts that begin with `REFUSED`, `FAILING`, `DEADLY` or
`SILENT` are refused, fail, end the engine, or get no answer.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

REFUSED, FAILING, DEADLY, SILENT = 9001, 9002, 9003, 9004
NO_MEMORY, NO_LOAD, KILLED = 9, 10, 11  # values of `max_model_len` with which the engine does not start
STEP_SECONDS = 0.001

__version__ = os.environ.get("FAKE_VLLM_VERSION", "0.32.0")
__path__: list[str] = []  # makes it a package, whose modules are below
LOG = os.environ.get("FAKE_VLLM_LOG", os.devnull)


def log(line: str) -> None:
    with Path(LOG).open("a") as file:
        file.write(line + "\n")


class VLLMClientError(Exception):
    pass


class VLLMValidationError(VLLMClientError):
    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class GracefulHTTPError(Exception):
    pass


class EngineDeadError(Exception):
    pass


class EngineGenerateError(Exception):
    pass


class StatLoggerBase:
    pass


@dataclasses.dataclass
class AsyncEngineArgs:
    model: str = ""
    runner: str = ""
    dtype: str = ""
    max_num_seqs: int = 0
    max_model_len: int = 512
    enable_prefix_caching: bool = False
    kv_cache_dtype: str = ""
    kv_cache_memory_bytes: int = 0
    scheduling_policy: str = ""
    max_logprobs: int = 0
    generation_config: str = ""
    structured_outputs_config: Any = None
    language_model_only: bool = False
    use_tqdm_on_load: bool = True
    tensor_parallel_size: int = 1
    hf_token: str = ""

    def create_engine_config(self) -> Any:
        if self.tensor_parallel_size > 8:
            raise ValueError("World size is larger than the number of available GPUs.\nSee the documentation.")
        return SimpleNamespace(
            model_config=SimpleNamespace(
                architecture="LlamaForCausalLM",
                dtype="torch.bfloat16",
                max_model_len=self.max_model_len,
                get_vocab_size=lambda: 10_000,
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=64, block_size=16, enable_prefix_caching=True),
            scheduler_config=SimpleNamespace(max_num_seqs=self.max_num_seqs),
        )


_FAILURES = {
    NO_MEMORY: 'raise RuntimeError("DefaultCPUAllocator: can\'t allocate memory: you tried to allocate 9 bytes.")',
    NO_LOAD: "try: {}['q']\nexcept KeyError as error: raise ValueError('there is no q: see\\nhere') from error",
    KILLED: "import os; os.kill(os.getpid(), 9)",
}


class AsyncLLM:
    def __init__(self, config: Any, stat_loggers: list[Any]) -> None:
        self.vllm_config = config
        self.errored = False
        self._loggers = [each(config, 0) for each in stat_loggers]
        # vLLM computes in a process of its own.
        self._engine_core = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        log(f"engine {self._engine_core.pid}")

    @classmethod
    def from_vllm_config(cls, config: Any, *, stat_loggers: list[Any], disable_log_stats: bool) -> AsyncLLM:
        code = _FAILURES.get(config.model_config.max_model_len)
        if code is not None:
            status = subprocess.run([sys.executable, "-c", code]).returncode
            raise RuntimeError(f"See root cause above. Failed core proc(s): {{'EngineCore': {status}}}")
        return cls(config, stat_loggers)

    def shutdown(self) -> None:
        log("shutdown")
        self.errored = True
        self._engine_core.kill()

    async def generate(
        self, prompt: dict[str, Any], params: Any, request_id: str, *, priority: int = 0
    ) -> AsyncGenerator[Any]:
        tokens = prompt["prompt_token_ids"]
        match tokens[0]:
            case 9001:
                raise VLLMValidationError("it is not to my taste", parameter="prompt")
            case 9002:
                raise EngineGenerateError
            case 9003:
                self.errored = True
                raise EngineDeadError
            case 9004:
                await asyncio.Event().wait()
        try:
            for index in range(params.max_tokens):
                await asyncio.sleep(STEP_SECONDS)
                token = tokens[index % len(tokens)]
                stopped = token in params.stop_token_ids
                finish = "stop" if stopped else "length" if index + 1 == params.max_tokens else None
                self._record()
                completion = SimpleNamespace(token_ids=[token], logprobs=None, finish_reason=finish, stop_reason=None)
                yield SimpleNamespace(
                    outputs=[completion],
                    prompt_logprobs=None,
                    num_cached_tokens=0,
                    metrics=SimpleNamespace(queued_ts=1.0, scheduled_ts=1.0),
                )
                if finish:
                    return
        except asyncio.CancelledError:
            log(f"aborted {request_id}")
            raise

    def _record(self) -> None:
        stats = SimpleNamespace(
            num_preempted_reqs=0,
            num_generation_tokens=1,
            prompt_token_stats=SimpleNamespace(computed=0),
            inter_token_latencies_iter=[],
        )
        for each in self._loggers:
            each.record(None, stats)


def _module(name: str, **contents: Any) -> None:
    """Make a module importable."""
    module = types.ModuleType(name)
    module.__dict__.update(contents, __path__=[])
    sys.modules[name] = module


SamplingParams = StructuredOutputsParams = SimpleNamespace
_module("vllm.engine")
_module("vllm.engine.arg_utils", AsyncEngineArgs=AsyncEngineArgs)
_module("vllm.exceptions", VLLMClientError=VLLMClientError, GracefulHTTPError=GracefulHTTPError)
_module("vllm.inputs")
_module("vllm.inputs.engine", tokens_input=lambda tokens, cache_salt: {"prompt_token_ids": tokens})
_module("vllm.platforms", current_platform=SimpleNamespace(device_type="cpu"))
_module(
    "vllm.sampling_params",
    RequestOutputKind=SimpleNamespace(DELTA=1),
    StructuredOutputsParams=StructuredOutputsParams,
)
_module("vllm.v1")
_module("vllm.v1.engine")
_module("vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)
_module("vllm.v1.engine.exceptions", EngineDeadError=EngineDeadError)
_module("vllm.v1.metrics")
_module("vllm.v1.metrics.loggers", StatLoggerBase=StatLoggerBase)
