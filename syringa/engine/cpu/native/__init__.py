"""The CPU kernels, in the variant that this processor can run. The headers beside this file have the maths."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from syringa.engine.cpu.features import cpu_flags

FOLDER = Path(__file__).parent
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
NEEDS = {
    "avx512bf16": AVX512 | {"avx512_bf16"},
    "avx512": AVX512,
    "avx2": {"avx2", "fma"},
    "base": set[str](),
}


class DenseWeights(ctypes.Structure):
    _fields_ = [("values", c_void_p), ("outputs", c_int), ("inputs", c_int), ("half", c_int)]


class AttentionShape(ctypes.Structure):
    _fields_ = [("heads", c_int), ("kv_heads", c_int), ("size", c_int), ("window", c_int), ("scale", c_float)]


class AttentionBatch(ctypes.Structure):
    _fields_ = [
        ("sequences", c_int),
        ("starts", POINTER(c_int32)),
        ("first", POINTER(c_int32)),
        ("tables", POINTER(c_int32)),
        ("table_width", c_int),
    ]


class RotaryShape(ctypes.Structure):
    _fields_ = [("heads", c_int), ("kv_heads", c_int), ("size", c_int), ("rotary", c_int), ("eps", c_float)]


class Layer(ctypes.Structure):
    """One decoder layer, by the addresses of what it consists of. See decoder.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input_norm", "post_norm", "qkv", "out", "gate_up", "down")],
        *[(name, c_void_p) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias", "q_norm", "k_norm")],
        ("rotary", RotaryShape),
        ("attention", AttentionShape),
    ]


class Stack(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("count", c_int),
        ("hidden", c_int),
        ("eps", c_float),
        ("cosine", c_void_p),
        ("sine", c_void_p),
    ]


class StepRows(ctypes.Structure):
    _fields_ = [("x", c_void_p), ("positions", c_void_p), ("slots", c_void_p), ("rows", c_int)]


class Kernels:
    """The loaded library. Pointers are plain integers (`tensor.data_ptr()`)."""

    def __init__(self, variant: str, library: ctypes.CDLL, threads: int) -> None:
        self.variant = variant
        self.threads = threads
        library.syringa_start(threads)
        pointer, number = c_void_p, c_int
        self.pack = library.syringa_pack
        self.pack.argtypes, self.pack.restype = [pointer, number, number, number], pointer
        self.release = self._bind(library.syringa_release, pointer)
        self.linear = self._bind(library.syringa_linear, pointer, pointer, number, pointer, pointer, number)
        self.dense = self._bind(library.syringa_dense, pointer, pointer, number, pointer, pointer, number)
        self.rms_norm = self._bind(library.syringa_rms_norm, pointer, pointer, number, number, c_float, pointer)
        self.silu_mul = self._bind(library.syringa_silu_mul, pointer, number, number, pointer)
        self.rotary_and_cache = self._bind(
            library.syringa_rotary_and_cache, pointer, pointer, number, number, *[pointer] * 8, number
        )
        self.draw = self._bind(library.syringa_draw, pointer, c_int64, number, number, pointer, pointer, pointer)
        self.layers = self._bind(library.syringa_layers, *[pointer] * 5, c_int64, number)
        self.attention = self._bind(library.syringa_attention, *[pointer] * 5, number, pointer, number, number)

    @staticmethod
    def _bind(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
        function.argtypes, function.restype = list(arguments), None
        return function


@functools.cache
def load_kernels(threads: int) -> Kernels | None:
    """The best variant that is built and that this processor runs; None where none was built."""
    flags = cpu_flags()
    for variant, needs in NEEDS.items():
        path = FOLDER / f"kernels_{variant}.so"
        if path.exists() and needs <= flags:
            return Kernels(variant, ctypes.CDLL(str(path)), threads)
    return None
