"""The kernels run on the CPU, under Triton's interpreter: the same code, one program after the other."""

from __future__ import annotations

import os
import sys

from syringa.engine.gpu import missing_triton

collect_ignore: list[str] = []


def interpret() -> None:
    """Has to come before Triton is imported, which decides then."""
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "somebody imported Triton already"
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: type, scope: object) -> None:
        # Its own makes an int of an array with one element, which NumPy 2.4 refuses.
        patch(tensor, scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())  # type: ignore[attr-defined]

    interpreter._patch_lang_tensor = patched


if missing_triton():
    collect_ignore += ["test_attention.py", "test_elementwise.py", "test_flashinfer_ops.py", "test_linear.py"]
    collect_ignore += ["test_rotary.py", "test_batch_invariant.py"]
else:
    interpret()
