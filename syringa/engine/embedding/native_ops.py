"""The encoder on the compiled CPU kernels: operations between linear layers, and all layers in one call for int8."""

from __future__ import annotations

from ctypes import POINTER, addressof, byref, c_int32, c_void_p, cast
from typing import Any
from typing import cast as as_type

import numpy as np
import torch

from syringa.engine.cpu.layers.linear import NativeLinear
from syringa.engine.cpu.native import (
    AttentionShape,
    EncoderEmbeddingPointers,
    EncoderLayerPointers,
    EncoderRows,
    EncoderStack,
    Kernels,
    LayerNormPointers,
    PackedRows,
)
from syringa.engine.embedding.batch import PackedBatch
from syringa.engine.embedding.encoder import EncoderEmbedding, EncoderLayer, Norm, position_ids, token_types
from syringa.engine.embedding.encoder_config import EncoderConfig

BIDIRECTIONAL = -1  # the window of `AttentionShape` in native/attention.h
MAX_HEAD_SIZE = 512  # the same constant as in native/packed_attention.h


def attention_shape(config: EncoderConfig) -> AttentionShape:
    return AttentionShape(config.heads, config.heads, config.head_size, BIDIRECTIONAL, config.head_size**-0.5)


def packed_rows(batch: PackedBatch) -> PackedRows:
    """Return the layout of a batch for the kernels. It points to `batch.starts`."""
    return PackedRows(len(batch), _pointer(batch.starts))


def _pointer(array: np.ndarray) -> Any:
    return cast(array.ctypes.data, POINTER(c_int32))


def _norm_pointers(norm: Norm) -> LayerNormPointers:
    return LayerNormPointers(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)


class NativeEncoderOps:
    """`EncoderOps` on the compiled kernels, batch-invariant."""

    def __init__(self, kernels: Kernels, config: EncoderConfig, *, half: bool) -> None:
        """`half`: whether keys and values are bf16."""
        self.kernels, self.half = kernels, half
        self.hidden, self.shape = config.hidden, attention_shape(config)

    def layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        y = torch.empty_like(x)
        self.kernels.layer_norm(x.data_ptr(), byref(_norm_pointers(norm)), x.shape[0], x.shape[1], y.data_ptr())
        return y

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        self.kernels.gelu(x.data_ptr(), x.shape[0], x.shape[1])
        return x

    def attention(self, qkv: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        out = torch.empty(len(qkv), self.hidden)
        rows = packed_rows(batch)
        self.kernels.packed_attention(
            byref(self.shape), byref(rows), qkv.data_ptr(), qkv.shape[1], out.data_ptr(), self.hidden, self.half
        )
        return out


class FusedEncoder:
    """`Encoder` with int8 layers, in one call into the compiled kernels."""

    def __init__(
        self, kernels: Kernels, config: EncoderConfig, embedding: EncoderEmbedding, layers: list[EncoderLayer]
    ) -> None:
        self.kernels, self.config, self.hidden = kernels, config, config.hidden
        self._tensors = embedding, layers  # keeps the memory of the pointers below alive
        self._layers = (EncoderLayerPointers * config.layers)(*map(_layer_pointers, layers))
        self._stack = EncoderStack(
            EncoderEmbeddingPointers(
                embedding.tokens.data_ptr(),
                embedding.tokens.dtype == torch.bfloat16,
                embedding.positions.data_ptr(),
                embedding.types.data_ptr(),
                _norm_pointers(embedding.norm),
            ),
            self._layers,
            config.layers,
            config.hidden,
            attention_shape(config),
        )

    @torch.inference_mode()
    def encode(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden state of each token, fp32."""
        positions, types = position_ids(self.config, batch), token_types(self.config, batch)
        x = torch.empty(len(batch.tokens), self.hidden)
        rows = EncoderRows(
            *(_pointer(each) for each in (batch.tokens, positions, types)), len(batch.tokens), packed_rows(batch)
        )
        self.kernels.run_encoder(addressof(self._stack), byref(rows), x.data_ptr())
        return x


def _layer_pointers(layer: EncoderLayer) -> EncoderLayerPointers:
    linears = {name: as_type(NativeLinear, getattr(layer, name)) for name in ("qkv", "out", "up", "down")}
    return EncoderLayerPointers(
        **{name: c_void_p(linear.address) for name, linear in linears.items()},
        **{f"{name}_bias": c_void_p(linear.bias_address) for name, linear in linears.items()},
        attention_norm=_norm_pointers(layer.attention_norm),
        output_norm=_norm_pointers(layer.output_norm),
    )
