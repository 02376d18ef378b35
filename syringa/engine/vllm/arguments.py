"""The engine arguments and environment variables of vLLM, from the options of a worker."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Collection
from typing import Any

from syringa.engine.vllm.memory import CPU_CACHE_BYTES, sets_cache_size
from syringa.engine.worker.options import WorkerOptions
from syringa.errors import ConfigError
from syringa.modelfiles import ModelFiles

# vLLM's names of dtypes; fp8 is a quantization of a model in another dtype.
_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp32": "float32", "fp8": "auto"}
GIB = 1 << 30


def engine_arguments(
    options: WorkerOptions, files: ModelFiles, known: Collection[str], *, device: str
) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`, whose fields are `known`. Raises `ConfigError`.

    `engine_args` of the model take precedence over what is derived from its other settings.
    """
    if files.kind != "folder":
        raise ConfigError(f"{files.path} is a GGUF file: vLLM reads Hugging Face folders with safetensors")
    for name in options.engine_args:
        if name not in known or name.startswith("_"):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"engine_args.{name}: this version of vLLM has no such engine argument{hint}")
    arguments: dict[str, Any] = {
        "model": files.path,
        "runner": "generate",
        "dtype": _DTYPES[options.dtype],
        "max_num_seqs": options.max_running,
        "enable_prefix_caching": options.prefix_caching,
        "kv_cache_dtype": options.kv_cache_dtype,
        "scheduling_policy": "priority",
        "max_logprobs": -1,  # the API has its own limit
        "generation_config": "vllm",  # requests bring their end tokens
        "structured_outputs_config": {"backend": "guidance"},
        "language_model_only": True,
        "use_tqdm_on_load": False,
    }
    if options.dtype == "fp8":
        arguments["quantization"] = "fp8"
    if options.max_model_len:
        arguments["max_model_len"] = options.max_model_len
    if options.kv_cache_gb:
        arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gb * GIB)
    elif device == "cpu" and not sets_cache_size(options):
        arguments["kv_cache_memory_bytes"] = CPU_CACHE_BYTES
    if options.gpu_memory_fraction:
        arguments["gpu_memory_utilization"] = options.gpu_memory_fraction
    if options.step_tokens:
        arguments["max_num_batched_tokens"] = options.step_tokens
    return {**arguments, **options.engine_args}


def set_environment(options: WorkerOptions) -> None:
    """Set the variables that vLLM reads when it is imported, except those that the user has set."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        # At its level WARNING, vLLM has a line for each tensor that it converts.
        "VLLM_LOGGING_LEVEL": "DEBUG" if options.log_level == "debug" else "ERROR",
        "HF_HUB_OFFLINE": "1",  # the model's files are here
    }
    if options.threads:
        variables |= {"OMP_NUM_THREADS": str(options.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    # It logs at once, and reads its level later.
    level = os.environ["VLLM_LOGGING_LEVEL"].upper()
    logging.getLogger("vllm").setLevel(logging.getLevelNamesMapping().get(level, logging.ERROR))


def check_device(device: str, installed: str) -> None:
    """Raise `ConfigError` if vLLM was built for another device than the one that is configured."""
    if device != "auto" and device != installed:
        raise ConfigError(f"device {device!r}: the vLLM of this environment is built for {installed!r}")
