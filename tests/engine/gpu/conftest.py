"""Run the Triton kernels on the CPU with Triton's interpreter, one program after the other."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

from syringa.engine.gpu import missing_triton
from syringa.engine.gpu.kernels import reference

collect_ignore: list[str] = []


def enable_interpreter() -> None:
    """Enable Triton's interpreter. Must run before Triton is imported, which reads the variable then."""
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "Triton is already imported"
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        # The original converts an array with one element to int, which NumPy 2.4 rejects.
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


# Modules that import Triton kernels at the top.
KERNEL_TESTS = [
    "test_batch_invariant_check.py",
    "test_batch_invariant_kernels.py",
    "test_batch_invariant_ops.py",
    "test_decode_attention.py",
    "test_delta_net.py",
    "test_elementwise.py",
    "test_fp8_cache.py",
    "test_fp8_decoder.py",
    "test_flashinfer_ops.py",
    "test_gemma_decoder.py",
    "test_linear.py",
    "test_moe.py",
    "test_prefill_attention.py",
    "test_quantized_decoder.py",
    "test_quantized_gemm.py",
    "test_rotary.py",
    "test_shared_memory.py",
]
if missing_triton():
    collect_ignore += KERNEL_TESTS
else:
    enable_interpreter()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """On a busy machine, waking a second thread costs many times the work of such small operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "kernel"])
def sample(request: pytest.FixtureRequest) -> Callable[..., torch.Tensor]:
    """The sampling function under test: the PyTorch reference and the Triton kernel."""
    if request.param == "reference":
        return reference.sample
    if reason := missing_triton():
        pytest.skip(reason)
    from syringa.engine.gpu.kernels import sampling

    return sampling.sample
