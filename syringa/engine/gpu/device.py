"""Whether there is a GPU that will do, and what it has room for. Says in one line what is wrong and what would help."""

from __future__ import annotations

import torch

from syringa.engine.gpu import missing_triton
from syringa.engine.scheduling.oom import NO_GPU_MEMORY as NO_GPU_MEMORY
from syringa.errors import ConfigError, ModelError

GIB = 2**30
BF16_FROM = (8, 0)  # compute capability
FP8_FROM = (8, 9)
MARGIN = 0.06  # of the GPU's memory that is left alone: other programs, fragmentation, what libraries keep
CONTEXT = 600 << 20  # bytes that a process takes on a GPU before it has anything there


def find_gpu() -> str | None:
    """Why there is no GPU to use; None: there is one."""
    if not torch.backends.cuda.is_built():
        return "this PyTorch was built without CUDA: install its CUDA build"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().split("\n", 1)[0].rstrip(".")  # a driver that is too old says so itself
    if not torch.cuda.is_available() or not torch.cuda.device_count():
        return "no NVIDIA GPU is found"
    if (found := torch.cuda.get_device_capability()) < BF16_FROM:
        name = torch.cuda.get_device_name()
        return f"{name} has compute capability {found[0]}.{found[1]}, and 8.0 is needed (Ampere or newer)"
    return missing_triton()


def choose_device(wanted: str, dtype: str, *, native: bool, name: str = "This model") -> torch.device:
    """`wanted`: auto, cpu or cuda. Raises `ConfigError` for what cannot be had."""
    if dtype == "fp8" and wanted == "cpu":
        raise ConfigError("--dtype fp8 is for GPUs: use --dtype int8 on a CPU")
    if wanted == "cpu" or (wanted == "auto" and dtype in ("int8", "fp32")):
        return torch.device("cpu")
    if (reason := find_gpu()) is not None:
        if wanted == "auto" and dtype != "fp8":
            return torch.device("cpu")
        raise ConfigError(f"{'--device cuda' if wanted == 'cuda' else '--dtype fp8'} needs a GPU, and {reason}")
    if dtype in ("int8", "fp32"):
        raise ConfigError(
            f"--dtype {dtype} is for CPUs: use --dtype bf16{' or fp8' if native else ''} with --device cuda"
        )
    if dtype == "fp8" and not native:
        raise ConfigError(f"{name} runs on transformers' definition of it, which has no fp8: use --dtype bf16")
    if dtype == "fp8" and (found := torch.cuda.get_device_capability()) < FP8_FROM:
        raise ConfigError(f"--dtype fp8 needs compute capability 8.9, and this GPU has {found[0]}.{found[1]}: use bf16")
    return torch.device("cuda", torch.cuda.current_device())


def free_memory(device: torch.device) -> int:
    """Bytes that may still be taken."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(free - MARGIN * total)


def left_of_share(device: torch.device, fraction: float) -> int:
    """Bytes that a process may still take which may have this part of the GPU."""
    _, total = torch.cuda.mem_get_info(device)
    return int(fraction * (1 - MARGIN) * total) - torch.cuda.memory_allocated(device) - CONTEXT


def held_memory(device: torch.device) -> int:
    """Bytes that this process takes on the GPU."""
    return torch.cuda.memory_reserved(device) + CONTEXT


def check_weights(parameters: int, dtype: str, name: str, free: int, gpu: str, *, halvable: bool = True) -> None:
    """Refuses a model that cannot fit before gigabytes of it are read. `halvable`: there is fp8 for it."""
    need = {kind: parameters * size + GIB for kind, size in (("bf16", 2), ("fp8", 1))}
    if need[dtype] <= free:
        return
    hint = "choose a smaller model, or --device cpu"
    if halvable and dtype == "bf16" and need["fp8"] <= free:
        hint = f"--dtype fp8 would fit ({need['fp8'] / GIB:.1f} GiB), or use --device cpu"
    raise ModelError(
        f"{name} needs about {need[dtype] / GIB:.1f} GiB in {dtype}, and {max(free, 0) / GIB:.1f} GiB are free "
        f"on {gpu}: {hint}",
        code=NO_GPU_MEMORY,
    )


def blocks_that_fit(free: int, block_bytes: int, block_size: int, wanted: int, *, halvable: bool) -> int:
    """How many blocks the cache gets: `wanted`, or with 0 all that there is room for."""
    fit = max(free, 0) // block_bytes
    if wanted > fit:
        raise ConfigError(
            f"a cache of {wanted * block_size:,} tokens needs {wanted * block_bytes / GIB:,.1f} GiB on the GPU, and "
            f"{max(free, 0) / GIB:.1f} GiB are left: choose a smaller --kv-cache-gb or --kv-cache-tokens",
            code=NO_GPU_MEMORY,
        )
    if fit < 1:
        smaller = "--dtype fp8, a smaller --step-tokens" if halvable else "a smaller --step-tokens or --max-running"
        raise ModelError(
            f"the GPU has no room for a cache beside the weights: use {smaller}, or --device cpu", code=NO_GPU_MEMORY
        )
    return wanted or fit
