"""Choice of a model's dtype, and checks that it fits in memory and supports deterministic mode."""

from __future__ import annotations

from syringa.engine.cpu.features import NO_MEMORY, available_memory, cpu_flags
from syringa.engine.loading.model_size import ModelSize, gigabytes
from syringa.errors import ConfigError, ModelError

LOADED_BYTES_PER_WEIGHT = {"bf16": 2, "fp32": 4}  # int8 weights are quantized from bf16 ones
# A smaller model is bound by arithmetic in batches, and int8 needs less of it.
MIN_GGUF_PARAMETERS = 500_000_000
HEAD_SIZE_MULTIPLE = 16  # head sizes that the compiled attention kernels support


def choose_dtype(model: ModelSize, requested: str, kernels: str | None) -> str:
    """Resolve "auto": int8 or gguf with the compiled kernels, else bf16 if the CPU has bf16 arithmetic, else fp32.

    `kernels`: their variant, None without them.
    """
    if requested in ("int8", "gguf") and kernels is None:
        raise ConfigError(
            f"--dtype {requested} needs the compiled CPU kernels: install a C++ compiler and reinstall, "
            "or use --dtype bf16 or fp32"
        )
    if requested == "fp8":
        raise ConfigError("--dtype fp8 is for GPUs: use --dtype int8 on a CPU")
    if requested == "gguf" and "gguf" not in model.weights:
        raise ConfigError(f"--dtype gguf is for GGUF files, and {model.name} is not one: use --dtype int8")
    if requested != "auto":
        return requested
    if kernels is not None:
        return "gguf" if prefers_gguf(model, kernels) else "int8"
    return "bf16" if cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"} else "fp32"


def prefers_gguf(model: ModelSize, kernels: str) -> bool:
    """Return whether a GGUF file's own quantization is faster than int8."""
    smaller = "gguf" in model.weights and model.file_bytes < model.parameters
    return smaller and model.parameters >= MIN_GGUF_PARAMETERS and kernels != "base"


def check_host_memory(parameters: int, dtype: str, name: str) -> None:
    """Raise `ModelError` if the weights of transformers' definition do not fit in memory while they are loaded.

    On a CPU this repeats `memory_plan.plan_memory`, which counts the weights in the files: the definition of a
    malformed model may have far more. Weights for a GPU pass through the host's memory, too.
    """
    need, have = parameters * LOADED_BYTES_PER_WEIGHT[dtype], available_memory()
    if need > have:
        raise ModelError(
            f"{name} needs {gigabytes(need)} of memory for its weights in {dtype} while it is loaded and "
            f"{gigabytes(have)} are free: free some memory, or choose a smaller model",
            code=NO_MEMORY,
        )


def check_deterministic_gpu(
    dtype: str, *, native: bool, attention: str = "auto", experts: bool = False, hybrid: bool = False
) -> None:
    """Raise `ConfigError` if `--deterministic` is not supported on a GPU for these options."""
    _check_native(native)
    if experts:
        raise ConfigError("--deterministic on a GPU does not support mixture-of-experts models yet: leave it out")
    if hybrid:
        raise ConfigError("--deterministic on a GPU does not support models with linear attention yet: leave it out")
    if dtype not in ("auto", "bf16"):
        raise ConfigError(f"--deterministic on a GPU is for bf16, not for {dtype}: use --dtype bf16")
    if attention == "flashinfer":
        raise ConfigError("--deterministic takes our own attention: leave out --attention flashinfer")


def check_deterministic_cpu(dtype: str, *, native: bool, compiled: bool, head_size: int) -> None:
    """Raise `ConfigError` if `--deterministic` is not supported on a CPU for these options."""
    _check_native(native)
    if not compiled:
        raise ConfigError("--deterministic on a CPU needs the compiled kernels: install a C++ compiler and reinstall")
    if dtype not in ("int8", "gguf", "bf16"):
        raise ConfigError(f"--deterministic on a CPU is for int8, gguf and bf16, not for {dtype}")
    if head_size % HEAD_SIZE_MULTIPLE:
        raise ConfigError(
            f"--deterministic on a CPU is for heads of a multiple of {HEAD_SIZE_MULTIPLE}, "
            f"and this model's are of {head_size}"
        )


def _check_native(native: bool) -> None:
    if not native:
        raise ConfigError("--deterministic is not for models that run on transformers' definitions: leave it out")
