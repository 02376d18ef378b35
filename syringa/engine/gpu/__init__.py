"""The GPU engine: Triton kernels, a decoder on top of them, and the model runner.

`kernels` has the Triton kernels and their PyTorch references (`kernels.reference`, which needs torch alone). `ops`
chooses between kernels and references, `decoder` is the model, `model_runner` prepares and launches steps, `model`
sizes the KV cache. Modules that contain kernels import Triton: check `missing_triton` first.

Activations and weights are bf16 and sums fp32. No kernel waits for the host, allocates a data-dependent size, or sums
in an order that depends on timing: all of them can be captured in a CUDA graph and are deterministic.
"""

from __future__ import annotations

import importlib.util


def missing_triton() -> str | None:
    """Return why the kernels cannot be imported, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it comes with the CUDA builds of PyTorch"
    return None
