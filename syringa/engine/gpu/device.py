"""GPU selection and memory accounting. Errors are one line: what is wrong, and what would help."""

from __future__ import annotations

import torch

from syringa.engine.gpu import missing_triton
from syringa.engine.loading.alternatives import describe_gpu_alternatives
from syringa.engine.loading.gpu_size import MIN_GPU_OVERHEAD
from syringa.engine.loading.memory_plan import GPU_MARGIN
from syringa.engine.scheduling.oom import NO_GPU_MEMORY as NO_GPU_MEMORY
from syringa.errors import ConfigError, ModelError

GIB = 2**30
MIN_BF16_CAPABILITY = (8, 0)  # compute capability
MIN_FP8_CAPABILITY = (8, 9)
CONTEXT_BYTES = 600 << 20  # memory of an idle CUDA context


def gpu_unavailable_reason() -> str | None:
    """Return why no GPU can be used, or None if one can."""
    if not torch.backends.cuda.is_built():
        return "this PyTorch was built without CUDA: install its CUDA build"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().split("\n", 1)[0].rstrip(".")  # for example a driver that is too old
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return "no NVIDIA GPU is found"
    if (found := torch.cuda.get_device_capability()) < MIN_BF16_CAPABILITY:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {found[0]}.{found[1]}, and 8.0 is needed (Ampere or newer)"
    return missing_triton()


def choose_device(requested: str, dtype: str, *, native: bool, name: str = "This model") -> torch.device:
    """Return the device for `requested` (auto, cpu or cuda). Raises `ConfigError` if it cannot be used."""
    if dtype == "fp8" and requested == "cpu":
        raise ConfigError("--dtype fp8 is for GPUs: use --dtype int8 on a CPU")
    if requested == "cpu" or (requested == "auto" and dtype in ("int8", "gguf", "fp32")):
        return torch.device("cpu")
    if (reason := gpu_unavailable_reason()) is not None:
        if requested == "auto" and dtype != "fp8":
            return torch.device("cpu")
        raise ConfigError(f"{'--device cuda' if requested == 'cuda' else '--dtype fp8'} needs a GPU, and {reason}")
    if dtype in ("int8", "gguf", "fp32"):
        raise ConfigError(
            f"--dtype {dtype} is for CPUs: use --dtype bf16{' or fp8' if native else ''} with --device cuda"
        )
    if dtype == "fp8" and not native:
        raise ConfigError(f"{name} runs on transformers' definition of it, which has no fp8: use --dtype bf16")
    if dtype == "fp8":
        check_fp8_capability(None, "--dtype fp8")
    return torch.device("cuda", torch.cuda.current_device())


def check_fp8_capability(device: torch.device | None, name: str, instead: str = "use --dtype bf16") -> None:
    """Raise `ConfigError` if the GPU has no FP8 numbers, which `name` needs."""
    if (found := torch.cuda.get_device_capability(device)) < MIN_FP8_CAPABILITY:
        raise ConfigError(f"{name} needs compute capability 8.9, and this GPU has {found[0]}.{found[1]}: {instead}")


def free_memory(device: torch.device) -> int:
    """Return the bytes that may still be allocated, margin deducted."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - GPU_MARGIN * total)


def remaining_memory_share(device: torch.device, fraction: float) -> int:
    """Return the bytes that this process may still allocate if it may use this fraction of the GPU."""
    _, total = torch.cuda.mem_get_info(device)
    return int(fraction * (1 - GPU_MARGIN) * total) - torch.cuda.memory_allocated(device) - CONTEXT_BYTES


def used_gpu_memory(device: torch.device) -> int:
    """Return the GPU memory that this process uses, in bytes."""
    return torch.cuda.memory_reserved(device) + CONTEXT_BYTES


def check_weights_fit(weights: int, dtype: str, name: str, free: int, gpu: str, *, in_fp8: int = 0) -> None:
    """Raise `ModelError` if so many bytes of weights cannot fit, before they are read.

    `in_fp8`: their bytes with --dtype fp8, if it may be suggested.
    """
    need = weights + MIN_GPU_OVERHEAD
    if need <= free:
        return
    hint = describe_gpu_alternatives(weights, free, in_fp8=in_fp8 if dtype == "bf16" else 0)
    raise ModelError(
        f"{name} needs about {need / GIB:.1f} GiB in {dtype}, and {max(free, 0) / GIB:.1f} GiB are free "
        f"on {gpu}: {hint}",
        code=NO_GPU_MEMORY,
    )


def num_cache_blocks(free: int, block_bytes: int, block_size: int, requested: int, *, supports_fp8: bool) -> int:
    """Return the number of cache blocks: `requested`, or as many as fit if it is 0."""
    fit = max(free, 0) // block_bytes
    if requested > fit:
        raise ConfigError(
            f"a cache of {requested * block_size:,} tokens needs {requested * block_bytes / GIB:,.1f} GiB on the GPU, "
            f"and {max(free, 0) / GIB:.1f} GiB are left: choose a smaller --kv-cache-gb or --kv-cache-tokens",
            code=NO_GPU_MEMORY,
        )
    if fit < 1:
        smaller = "--dtype fp8, a smaller --step-tokens" if supports_fp8 else "a smaller --step-tokens or --max-running"
        raise ModelError(
            f"the GPU has no room for a cache beside the weights: use {smaller}, or --device cpu", code=NO_GPU_MEMORY
        )
    return requested or fit
