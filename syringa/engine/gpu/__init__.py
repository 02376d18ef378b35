"""What runs on the GPU below the runner: Triton kernels, each with a plain PyTorch reference.

`reference` needs torch alone. The modules that hold kernels import Triton, so whoever wants them asks `missing_triton`
first, and nothing of the rest of Syringa: they can be measured on a bare machine. Above them, `ops` hides which of the
two runs, `decoder` is the model, `runner` lays out a step and starts it, `model` finds out what there is room for.

Activations and weights are bf16 and sums fp32. No kernel waits for the host, allocates a size that depends on data, or
adds in an order that depends on timing: all can be captured in a CUDA graph, and give the same bits every time.
"""

from __future__ import annotations

import importlib.util


def missing_triton() -> str | None:
    """Why the kernels cannot be imported, or None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: it comes with the CUDA builds of PyTorch"
    return None
