"""Compiles products, attention and delta nets as they are launched on a GPU with little shared memory, without one.

    python -m tests.engine.gpu.compiled_kernels 89 99

Arguments: the compute capability, and the KiB of shared memory that a program may use. Prints a JSON object with the
KiB by kernel and tile sizes. A process of its own, because tests run kernels by Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.language import target_info
from triton.tools.tensor_descriptor import TensorDescriptor

from syringa.engine.gpu.kernels import (
    batch_invariant_attention,
    batch_invariant_matmul,
    decode_attention,
    delta_net,
    elementwise,
    fixed_point,
    fp8,
    gemv,
    int4_gemv,
    launch,
    moe,
    prefill_attention,
    quantized_gemm,
    skinny_gemm,
)
from syringa.engine.gpu.ops.linear import linear
from syringa.engine.gpu.ops.quantized_linear import quantize_for, quantized_linear, quantized_matmul
from syringa.engine.gpu.packed_weight import PackedWeight
from syringa.engine.gpu.state_rows import PrefillStates
from syringa.engine.models.delta_rule import DeltaNetParameters
from syringa.engine.models.hybrid_config import DeltaNetShape
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

WARP = 32
FP8_CAPABILITY = 89
DESCRIPTOR_CAPABILITY = 90
PRODUCTS = (elementwise, fixed_point, fp8, gemv, int4_gemv, moe, quantized_gemm, skinny_gemm, batch_invariant_matmul)
MODULES = (*PRODUCTS, decode_attention, batch_invariant_attention, prefill_attention, delta_net)
ROWS = (1, 8, 16, 32, 64)
MANY_ROWS = (100, 128, 256, 4000)
MOE_TOKENS = (1, 64, 160, 900, 4000)
INPUTS, OUTPUTS, EXPERTS, TOP_K = 4096, (4096, 12288), 128, 8
HEADS, KV_HEADS, HEAD_SIZES = 32, 4, (64, 80, 128, 256)
ATTENTION_ROWS, CONTEXT, PROMPT = (1, 64, 512), 4096, 1024
DELTA_ROWS = (1, 64)
DELTA_NET = DeltaNetShape(key_heads=16, value_heads=32, key_size=128, value_size=128, kernel=4)  # of Qwen3.5
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}


# Constants that decide about shared memory, or about what a kernel computes.
SIZES = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "STAGES", "GATED", "FORMAT", "FP8_ROWS")
SIZES += ("HEAD_DIM", "ROWS", "KEYS", "STORE", "FROM_ROWS", "WINDOW", "BLOCK", "SIZE")
SIZES += ("NORM", "ADD", "GROUP", "SPLITS")


class CompiledKernel:
    """Stands in for a Triton kernel: compiles it instead of launching it."""

    def __init__(self, kernel: Any, target: GPUTarget, found: dict[str, float]) -> None:
        self.kernel, self.target, self.found = kernel, target, found

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.compile

    def compile(
        self, *args: Any, num_warps: int = 4, num_stages: int = 3, maxnreg: int | None = None, **constants: Any
    ) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False))
        label = " ".join([self.kernel.__name__, *(f"{each}={constants[each]}" for each in SIZES if each in constants)])
        if isinstance(cache := given.get("keys_ptr"), torch.Tensor):
            label += f" cache={TYPES[cache.dtype]}"
        if label in self.found:
            return
        source = ASTSource(
            self.kernel,
            signature={name: _type_of(given[name]) if name in given else "constexpr" for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i, each in enumerate(args) if _is_aligned(each)},
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, **({"maxnreg": maxnreg} if maxnreg else {})}
        compiled = triton.compile(source, target=self.target, options=options)
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
    if fp8_numbers:
        few_tiles = make_weight("fp8", 1024, 2 * INPUTS)
        quantized_matmul(empty(128, 2 * INPUTS), replace(few_tiles, cublas_scales=few_tiles.scales), None)
        x, norm = empty(128, INPUTS), empty(INPUTS)
        for kind in in_fp8:  # what comes before a product
            weight = make_weight(kind, INPUTS, INPUTS)
            quantize_for(x, weight, norm_weight=norm, eps=1e-6)
            quantize_for(x, weight, residual=x, norm_weight=norm, eps=1e-6)
            quantize_for(empty(128, 2 * INPUTS), weight, gated=True)
    for rows in (*ROWS, *MANY_ROWS):
        for outputs in OUTPUTS:
            batch_invariant_matmul.batch_invariant_matmul(empty(rows, INPUTS), empty(outputs, INPUTS))
    for tokens in MOE_TOKENS:
        x, logits = empty(tokens, 2048), empty(tokens, EXPERTS)
        moe.moe_mlp(x, logits, empty(EXPERTS, 1536, 2048), empty(EXPERTS, 2048, 768), TOP_K)
        for kind in ("int4", "mxfp4", *in_fp8):
            gate_up, down = make_weight(kind, EXPERTS, 1536, 2048), make_weight(kind, EXPERTS, 2048, 768)
            moe.moe_mlp(x, logits, gate_up, down, TOP_K)


def run_attention(*, fp8_numbers: bool) -> None:
    """Launch attention of decode steps and of prompts, over caches of every dtype."""

    def integers(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    for size in HEAD_SIZES:
        for dtype in (torch.bfloat16, *([torch.float8_e4m3fn] if fp8_numbers else [])):
            keys = empty(8, KV_HEADS, BLOCK_SIZE, size, dtype=dtype)
            norms, rotary = empty(size, dtype=torch.float32), empty(CONTEXT, size // 2, dtype=torch.float32)
            for window in (0, 128):
                for rows in ATTENTION_ROWS:
                    qkv, lengths = empty(rows, (HEADS + 2 * KV_HEADS) * size), integers(rows)
                    new = decode_attention.NewTokens(lengths, (rotary, rotary), (norms, norms), 1e-6)
                    tables = integers(rows, CONTEXT // BLOCK_SIZE)
                    batch_invariant_attention.batch_invariant_decode_attention(
                        qkv, keys, keys, tables, lengths, HEADS, window=window
                    )
                    for tokens in (None, new):  # of mixed steps, and of decode steps
                        decode_attention.decode_attention(
                            qkv, keys, keys, tables, lengths, HEADS, new=tokens, window=window
                        )
                qkv, starts = empty(PROMPT, (HEADS + 2 * KV_HEADS) * size), integers(2)
                tables, tiles = integers(1, CONTEXT // BLOCK_SIZE), integers(PROMPT // prefill_attention.ROWS, 2)
                from_rows = launch.has_large_shared_memory() and prefill_attention.has_all_keys(qkv, keys)
                prefill_attention.prefill_attention(
                    qkv, keys, keys, tables, tiles, starts, integers(1), HEADS, window=window, from_rows=from_rows
                )


def run_delta_nets() -> None:
    """Launch the delta nets of decode steps and of prompts, with few and with many sequences."""

    def integers(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.int32)

    def floats(*shape: int) -> torch.Tensor:
        return empty(*shape, dtype=torch.float32)

    shape = DELTA_NET
    heads = shape.value_heads
    weights = DeltaNetParameters(
        floats(shape.kernel, shape.channels), floats(heads), floats(heads), floats(shape.value_size)
    )
    for rows in DELTA_ROWS:
        states = floats(rows, shape.kernel - 1, shape.channels), floats(rows, heads, shape.key_size, shape.value_size)
        projected, out = empty(rows * 64, shape.projected), empty(rows * 64, shape.value_width)
        gates, slots = projected[:, -2 * heads :], integers(rows)
        delta_net.delta_net_decode(
            projected[:rows], gates[:rows], weights, shape, 1e-6, slots, integers(rows), *states, out[:rows]
        )
        prefill = PrefillStates(
            chunk_starts=integers(rows + 1),
            chunk_sequences=integers(rows),
            row_sequences=integers(rows * 64),
            snapshot_rows=integers(rows),
            snapshot_slots=integers(rows),
        )
        delta_net.delta_net_prefill(
            projected, gates, weights, shape, 1e-6, slots, integers(rows + 1), integers(rows), prefill, *states, out
        )


def main() -> None:
    capability, kib = map(int, sys.argv[1:])
    for module in (launch, delta_net, prefill_attention):  # the latter two import it by name
        module.shared_memory = lambda: kib << 10  # type: ignore[assignment]
    moe.loads_descriptors_ahead = lambda: capability >= DESCRIPTOR_CAPABILITY  # type: ignore[assignment]
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
    run_attention(fp8_numbers=capability >= FP8_CAPABILITY)
    run_delta_nets()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
