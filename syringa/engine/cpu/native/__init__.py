"""ctypes bindings of the compiled CPU kernels, in the best variant that this processor supports."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

from syringa.engine.cpu.features import cpu_flags

FOLDER = Path(__file__).parent
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"}
REQUIRED_FLAGS = {
    "avx512bf16": AVX512 | {"avx512_bf16"},
    "avx512": AVX512,
    "avxvnni": AVX2 | {"avx_vnni"},
    "avx2": AVX2,
    "base": set[str](),
}


# Numbers of GGUF tensor types, `BlockType` in gguf_blocks.h: those that the kernels multiply as they are, and those of
# plain numbers.
BLOCK_TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_NL": 20,
    "IQ4_XS": 23,
    "MXFP4": 39,
}
FLOAT_TYPES = {"F32": 0, "F16": 1, "BF16": 30}
GATES = {"silu": 0, "gelu_tanh": 1, "clamped_swiglu": 2}  # `GateKind` in panels.h
POOLINGS = {"mean": 0, "cls": 1, "lasttoken": 2, "max": 3, "weightedmean": 4}  # `Pooling` in pooling.h


class TensorBlocks(ctypes.Structure):
    """A tensor as it is stored. `TensorBlocks` in dequantize.h."""

    _fields_ = [("data", c_void_p), ("order", c_void_p), ("type", c_int32), ("rows", c_int)]


class DenseWeights(ctypes.Structure):
    _fields_ = [("values", c_void_p), ("outputs", c_int), ("inputs", c_int), ("half", c_int)]


class AttentionShape(ctypes.Structure):
    _fields_ = [
        *[(name, c_int) for name in ("heads", "kv_heads", "size", "window")],
        ("scale", c_float),
        ("softcap", c_float),
        ("sinks", c_void_p),
    ]


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


class DeltaNetLayer(ctypes.Structure):
    """A gated delta net without its projections. `DeltaNetLayer` in delta_net.h."""

    _fields_ = [
        *[(name, c_int) for name in ("key_heads", "value_heads", "key_size", "value_size", "kernel")],
        ("eps", c_float),
        *[(name, c_void_p) for name in ("conv", "rate", "dt_bias", "norm")],
    ]


class DeltaNetStates(ctypes.Structure):
    """The sequences of a step with their states in a layer. `DeltaNetStates` in delta_net.h."""

    _fields_ = [
        ("sequences", c_int),
        *[(name, c_void_p) for name in ("starts", "first", "slots", "snapshot_rows", "snapshot_slots")],
        *[(name, c_void_p) for name in ("conv", "recurrent")],
    ]


class SparseLayerPointers(ctypes.Structure):
    """A layer of experts as pointers to its weights. `SparseLayer` in experts.h."""

    _fields_ = [
        *[(name, c_int) for name in ("hidden", "count", "per_token", "sigmoid", "normalize")],
        ("scale", c_float),
        *[(name, c_void_p) for name in ("router", "router_bias", "correction")],
        *[(name, POINTER(c_void_p)) for name in ("gate_up", "down", "gate_up_bias", "down_bias")],
        *[(name, c_void_p) for name in ("shared_gate_up", "shared_down", "shared_gate")],
    ]


class DecoderLayerPointers(ctypes.Structure):
    """One decoder layer as pointers to its weights. `DecoderLayer` in decoder.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("input_norm", "post_norm", "attention_norm", "mlp_norm")],
        *[(name, c_void_p) for name in ("qkv", "out", "gate_up", "down")],
        *[(name, c_void_p) for name in ("qkv_bias", "out_bias", "gate_up_bias", "down_bias")],
        ("experts", POINTER(SparseLayerPointers)),
        *[(name, c_void_p) for name in ("q_norm", "k_norm", "cosine", "sine")],
        ("rotary", RotaryShape),
        ("attention", AttentionShape),
    ]


class DecoderStack(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(DecoderLayerPointers)),
        ("count", c_int),
        ("hidden", c_int),
        ("eps", c_float),
    ]


class StepRows(ctypes.Structure):
    _fields_ = [
        ("x", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("rows", c_int),
        ("kept", c_void_p),
        ("num_kept", c_int),
    ]


class PackedRows(ctypes.Structure):
    """Where the sequences of a packed batch begin. `PackedBatch` in packed_attention.h."""

    _fields_ = [("sequences", c_int), ("starts", POINTER(c_int32))]


class LayerNormPointers(ctypes.Structure):
    """`LayerNorm` in rowwise.h."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float)]


class EncoderLayerPointers(ctypes.Structure):
    """One encoder layer as pointers to its weights. `EncoderLayer` in encoder.h."""

    _fields_ = [
        *[(name, c_void_p) for name in ("qkv", "out", "up", "down")],
        *[(name, c_void_p) for name in ("qkv_bias", "out_bias", "up_bias", "down_bias")],
        ("attention_norm", LayerNormPointers),
        ("output_norm", LayerNormPointers),
    ]


class EncoderEmbeddingPointers(ctypes.Structure):
    """`EncoderEmbedding` in encoder.h."""

    _fields_ = [
        ("tokens", c_void_p),
        ("half", c_int),
        ("positions", c_void_p),
        ("types", c_void_p),
        ("norm", LayerNormPointers),
    ]


class EncoderStack(ctypes.Structure):
    _fields_ = [
        ("embedding", EncoderEmbeddingPointers),
        ("layers", POINTER(EncoderLayerPointers)),
        ("count", c_int),
        ("hidden", c_int),
        ("attention", AttentionShape),
    ]


class EncoderRows(ctypes.Structure):
    _fields_ = [
        *[(name, POINTER(c_int32)) for name in ("tokens", "positions", "types")],
        ("rows", c_int),
        ("batch", PackedRows),
    ]


class Kernels:
    """The loaded library. Pointers are passed as integers (`tensor.data_ptr()`)."""

    def __init__(self, variant: str, library: ctypes.CDLL, threads: int) -> None:
        self.variant = variant
        self.threads = threads
        library.syringa_start(threads)
        pointer, number = c_void_p, c_int
        self.quantize_tensors = library.syringa_quantize_tensors
        self.quantize_tensors.argtypes, self.quantize_tensors.restype = [pointer, number, number, number], pointer
        self.pack_weights = library.syringa_pack_weights
        self.pack_weights.argtypes, self.pack_weights.restype = [pointer, number, number, number], pointer
        self.check_tensor = library.syringa_check_tensor
        self.check_tensor.argtypes, self.check_tensor.restype = [pointer, number], number
        self.read_tensor = library.syringa_read_tensor
        self.read_tensor.argtypes, self.read_tensor.restype = [pointer, number, pointer, number], number
        self.unpack_rows = self._bind(library.syringa_unpack_rows, pointer, pointer, number, pointer)
        self.set_gate = self._bind(library.syringa_set_gate, pointer, number, c_float, c_float)
        self.free_weights = self._bind(library.syringa_free_weights, pointer)
        self.linear = self._bind(library.syringa_linear, pointer, pointer, number, pointer, pointer, number)
        self.dense_linear = self._bind(library.syringa_dense_linear, pointer, pointer, number, pointer, pointer, number)
        self.rms_norm = self._bind(library.syringa_rms_norm, pointer, pointer, number, number, c_float, pointer)
        self.gate = self._bind(library.syringa_gate, pointer, number, number, number, c_float, c_float, pointer)
        self.experts = self._bind(library.syringa_experts, pointer, pointer, number, pointer)
        self.sigmoid_mul = self._bind(library.syringa_sigmoid_mul, pointer, number, number, pointer, number, number)
        self.rotary_and_cache = self._bind(
            library.syringa_rotary_and_cache, pointer, pointer, number, number, *[pointer] * 8, number
        )
        self.sample = self._bind(library.syringa_sample, pointer, c_int64, number, number, pointer, pointer, pointer)
        self.run_layers = self._bind(library.syringa_run_layers, *[pointer] * 5, c_int64, number)
        self.delta_net = self._bind(library.syringa_delta_net, pointer, pointer, pointer, number, pointer)
        self.attention = self._bind(library.syringa_attention, *[pointer] * 5, number, pointer, number, number)
        self.layer_norm = self._bind(library.syringa_layer_norm, pointer, pointer, number, number, pointer)
        self.gelu = self._bind(library.syringa_gelu, pointer, number, number)
        self.packed_attention = self._bind(
            library.syringa_packed_attention, *[pointer] * 3, number, pointer, number, number
        )
        self.run_encoder = self._bind(library.syringa_run_encoder, pointer, pointer, pointer)
        self.pool = self._bind(library.syringa_pool, pointer, pointer, number, number, pointer)
        self.normalize = self._bind(library.syringa_normalize, pointer, number, number)

    @staticmethod
    def _bind(function: ctypes._NamedFuncPointer, *arguments: type) -> ctypes._NamedFuncPointer:
        function.argtypes, function.restype = list(arguments), None
        return function


def kernel_variant() -> str | None:
    """Return the best variant that was built and this processor supports, or None if none was built."""
    available = cpu_flags()
    found = (name for name, flags in REQUIRED_FLAGS.items() if _path(name).exists() and flags <= available)
    return next(found, None)


@functools.cache
def load_kernels(threads: int) -> Kernels | None:
    """Return the kernels in their best variant, or None if none was built."""
    variant = kernel_variant()
    return Kernels(variant, ctypes.CDLL(str(_path(variant))), threads) if variant else None


def _path(variant: str) -> Path:
    return FOLDER / f"kernels_{variant}.so"
