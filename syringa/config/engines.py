"""The engine of a model: which of its settings vLLM has an equivalent for, and checks of those that are for vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import msgspec

from syringa.config.specs import ModelSpec
from syringa.config.validation import InvalidValue, Path, format_path, format_value

VLLM_ONLY = ("python", "engine_args")
# Settings that vLLM has no equivalent for, with the values it cannot honor (none: any but the default), and the remedy.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "dtype": (("int8", "gguf"), "set dtype to auto, bf16, fp32 or fp8, or give one of vLLM's in engine_args"),
    "deterministic": ((True,), "vLLM's results depend on the batch; set deterministic = false for this model"),
    "kv_cache_tokens": ((), "set kv_cache_gb instead, or num_gpu_blocks_override in engine_args"),
}
# Engine arguments that the worker sets itself, and why no other value works.
RESERVED_ARGS = {
    "model": "set path instead",
    "tokenizer": "the server tokenizes with the tokenizer of the model's folder",
    "tokenizer_mode": "the server tokenizes with the tokenizer of the model's folder",
    "skip_tokenizer_init": "grammars need the tokenizer",
    "runner": "only models that generate text are served",
    "language_model_only": "images are not supported",
    "disable_log_stats": "the server's metrics need the statistics",
    "logprobs_mode": "log-probabilities are the model's own, before any sampling rule",
    "structured_outputs_config": "grammars are run by llguidance",
    "generation_config": "defaults of requests are in the model's `defaults`",
    **dict.fromkeys(("data_parallel_size", "data_parallel_size_local", "data_parallel_rank"), "set replicas instead"),
    "nnodes": "a replica runs on one node",
}
# Their product is the number of processes with a GPU each. `decode_context_parallel_size` divides those of
# `tensor_parallel_size`, and adds none.
_PARALLEL_ARGS = ("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")


def check_engine(path: Path, spec: ModelSpec, *, cluster: bool = False) -> ModelSpec:
    """Return the model with the absolute path of its interpreter. Raises `InvalidValue`.

    `cluster`: the interpreter is one of the nodes, and need not be on this machine.
    """
    if spec.engine != "vllm":
        for name in VLLM_ONLY:
            if getattr(spec, name):
                raise _invalid(path, spec, name, 'only for models with engine = "vllm"')
        return spec
    for name, (values, remedy) in _UNSUPPORTED.items():
        value = getattr(spec, name)
        if value in values or (not values and value):
            raise _invalid(path, spec, name, f"the model runs on vLLM, which has no equivalent; {remedy}")
    for name, reason in RESERVED_ARGS.items():
        if name in spec.engine_args:
            raise _invalid_arg(path, spec, name, f"not allowed here: {reason}")
    for name in _PARALLEL_ARGS:
        size = spec.engine_args.get(name, 1)
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise _invalid_arg(path, spec, name, "expected a whole number, at least 1")
    if not spec.python:
        return spec
    # Not resolved: the interpreter of a virtual environment is a link, and finds its packages by the link's name.
    python = os.path.abspath(FilePath(spec.python).expanduser())
    if not cluster and not (os.path.isfile(python) and os.access(python, os.X_OK)):
        raise _invalid(path, spec, "python", "no such executable file")
    return msgspec.structs.replace(spec, python=python)


def refuse_engine(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidValue` for a model that is added at run time and names a program to run."""
    for name in ("engine", *VLLM_ONLY):
        if fields.get(name, "syringa") != "syringa":
            raise InvalidValue((name,), f"{name}: can only be set in the configuration file, under [[models]]")


def parallel_gpus(engine_args: Mapping[str, Any]) -> int:
    """Return the number of GPUs that one replica on vLLM uses."""
    count = 1
    for name in _PARALLEL_ARGS:
        count *= int(engine_args.get(name, 1))
    return count


def _invalid(path: Path, spec: ModelSpec, name: str, problem: str) -> InvalidValue:
    where = (*path, name)
    return InvalidValue(where, f"{format_path(where)} {format_value(getattr(spec, name))}: {problem}")


def _invalid_arg(path: Path, spec: ModelSpec, name: str, problem: str) -> InvalidValue:
    where = (*path, "engine_args", name)
    return InvalidValue(where, f"{format_path(where)} {format_value(spec.engine_args[name])}: {problem}")
