"""Compiles the products as they are launched on a GPU with little shared memory, without one: prints what they take.

    python -m tests.engine.gpu.compiled_kernels 89 99

Arguments: the compute capability, and the KiB of shared memory that a program may use. Prints a JSON object with the
KiB by kernel and tile sizes. A process of its own, because tests run kernels by Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info
from triton.tools.tensor_descriptor import TensorDescriptor

from syringa.engine.gpu.kernels import (
    elementwise,
    fixed_point,
    fp8,
    gemv,
    int4_gemv,
    launch,
    moe,
    quantized_gemm,
    skinny_gemm,
)
from syringa.engine.gpu.ops.linear import linear
from syringa.engine.gpu.ops.quantized_linear import quantized_linear
from syringa.engine.gpu.packed_weight import PackedWeight

WARP = 32
FP8_CAPABILITY = 89
MODULES = (elementwise, fixed_point, fp8, gemv, int4_gemv, moe, quantized_gemm, skinny_gemm)
ROWS = (1, 8, 16, 32, 64)
MOE_TOKENS = (1, 64, 160, 900, 4000)
INPUTS, OUTPUTS, EXPERTS, TOP_K = 4096, (4096, 12288), 128, 8
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


class CompiledKernel:
    """Stands in for a Triton kernel: compiles it instead of launching it."""

    def __init__(self, kernel: Any, target: GPUTarget, found: dict[str, float]) -> None:
        self.kernel, self.target, self.found = kernel, target, found

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.compile

    def compile(self, *args: Any, num_warps: int = 4, **constants: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False))
        sizes = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "GATED", "FORMAT", "FP8_ROWS")
        label = " ".join([self.kernel.__name__, *(f"{each}={constants[each]}" for each in sizes if each in constants)])
        if label in self.found:
            return
        source = ASTSource(
            self.kernel,
            signature={name: _type_of(given[name]) if name in given else "constexpr" for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i, each in enumerate(args) if _is_aligned(each)},
        )
        compiled = triton.compile(source, target=self.target, options={"num_warps": num_warps})
        self.found[label] = compiled.metadata.shared / 1024


def _type_of(value: Any) -> str:
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)}>"
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def make_weight(kind: str, *shape: int) -> PackedWeight:
    """Return a weight without numbers: "fp8" with one scale per output, "fp8 blocks", or a format of four bits."""
    *outer, outputs, inputs = shape
    form, group = kind.split()[0], {"fp8": inputs, "mxfp4": 32}.get(kind, 128)
    scales = empty(*outer, inputs // group, outputs, dtype=torch.float16 if form == "int4" else torch.float32)
    if form == "fp8":
        data = empty(*shape, dtype=torch.float8_e4m3fn)
        return PackedWeight("fp8", data, scales, None, inputs, group, 0 if kind == "fp8" else group)
    data = empty(*outer, outputs, inputs // 2, dtype=torch.uint8)
    return PackedWeight("int4" if form == "int4" else "mxfp4", data, scales, None, inputs, group, min(128, 2 * group))


def run_products(*, fp8_numbers: bool) -> None:
    """Launch the products of decoders with every number of rows that has tile sizes of its own."""
    in_fp8 = ("fp8", "fp8 blocks") if fp8_numbers else ()
    for rows in ROWS:
        x = empty(rows, INPUTS)
        for outputs in OUTPUTS:
            for gated in (False, True):
                height = 2 * outputs if gated else outputs
                linear(x, empty(height, INPUTS), gated=gated)
                for kind in ("int4", *in_fp8):
                    quantized_linear(x, make_weight(kind, height, INPUTS), gated=gated)
    for tokens in MOE_TOKENS:
        x, logits = empty(tokens, 2048), empty(tokens, EXPERTS)
        moe.moe_mlp(x, logits, empty(EXPERTS, 1536, 2048), empty(EXPERTS, 2048, 768), TOP_K)
        for kind in ("int4", "mxfp4", *in_fp8):
            gate_up, down = make_weight(kind, EXPERTS, 1536, 2048), make_weight(kind, EXPERTS, 2048, 768)
            moe.moe_mlp(x, logits, gate_up, down, TOP_K)


def main() -> None:
    capability, kib = map(int, sys.argv[1:])
    launch.shared_memory = lambda: kib << 10  # type: ignore[assignment]
    found: dict[str, float] = {}
    target = GPUTarget("cuda", capability, WARP)

    def current_target() -> GPUTarget:
        return target

    current_target.__triton_builtin__ = True  # type: ignore[attr-defined]
    target_info.current_target = current_target
    for module in MODULES:
        for name, each in vars(module).items():
            if isinstance(each, triton.JITFunction) and name.endswith("_kernel"):
                setattr(module, name, CompiledKernel(each, target, found))
    run_products(fp8_numbers=capability >= FP8_CAPABILITY)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
