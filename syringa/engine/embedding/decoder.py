"""Decoders as encoders of texts (Qwen3-Embedding) on a CPU: the native decoder, whose last hidden states are pooled.

`gpu_decoder.py` does the same on a GPU. A step computes whole inputs, so nothing has to be cached: keys and values live
for one layer, and all layers share the blocks of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from syringa.engine.cpu.layers.cache import CacheTensors, LayerCache
from syringa.engine.cpu.layers.linear import Gate, LinearLayer
from syringa.engine.cpu.layers.native_ops import NativeOps, supports_head_size
from syringa.engine.cpu.layers.ops import CpuOps, TorchOps
from syringa.engine.embedding.batch import PackedBatch
from syringa.engine.embedding.weights import LayerReader
from syringa.engine.execution.batch import StepTensors
from syringa.engine.loading.weights import WeightSource
from syringa.engine.models.config import DecoderConfig, read_config
from syringa.engine.models.decoder import Decoder, Model
from syringa.engine.models.fused import FusedDecoder, can_fuse
from syringa.engine.models.layers import load_attention_tensors, load_layers
from syringa.engine.models.tensor_shapes import check_shapes
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE


class SharedCache:
    """A KV cache whose layers are all the same memory."""

    def __init__(self, one: CacheTensors, layers: int) -> None:
        """`one`: a cache of one layer."""
        self.keys = one.keys.expand(layers, *one.keys.shape[1:])
        self.values = one.values.expand(layers, *one.values.shape[1:])
        self.layers: list[LayerCache] = [one.layers[0]] * layers


class DecoderEncoder:
    """A decoder without its output layer. Attention is causal."""

    def __init__(self, model: Model, config: DecoderConfig, cache_dtype: torch.dtype) -> None:
        """`model` returns hidden states where a model returns logits."""
        self.model, self._config, self._cache_dtype = model, config, cache_dtype
        self._cache: SharedCache | None = None
        self._blocks = 0

    @torch.inference_mode()
    def encode(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden state of each token, fp32."""
        layout = block_layout(batch)
        cache: Any = self._reserve(layout.blocks)
        return self.model.forward(_step_tensors(batch, layout), cache)

    def _reserve(self, blocks: int) -> SharedCache:
        if self._cache is None or blocks > self._blocks:
            self._cache = None  # before the new one is allocated
            c = self._config
            one = CacheTensors(1, blocks, c.kv_heads, c.head_size, self._cache_dtype)
            self._cache, self._blocks = SharedCache(one, c.layers), blocks
        return self._cache


def load_decoder_encoder(
    weights: WeightSource,
    config: dict[str, Any],
    reader: LayerReader,
    length: int,
    progress: Callable[[], None] = lambda: None,
) -> DecoderEncoder:
    """Load a decoder of the native families on a CPU, without its output layer. Raises `ModelError`."""
    c = replace(read_config(config), tied=True)  # there is no output layer, tied or not
    check_shapes(c, weights, reader.path)
    native = reader.kernels is not None and supports_head_size(c.head_size)

    def make_linear(
        names: Sequence[str], bias: torch.Tensor | None, *, gate: Gate | None = None, apart: bool = False
    ) -> LinearLayer:
        return reader.linear(names, bias, gate=gate if native else None)

    def make_exact(name: str, bias: str | None) -> LinearLayer:
        return reader.exact_linear(name, bias)

    tensors = load_attention_tensors(c, reader.read, length)
    ops: CpuOps = TorchOps(c, tensors)
    if reader.kernels is not None and native:
        ops = NativeOps(reader.kernels, c, tensors)
    layers = load_layers(c, reader.read, make_linear, make_exact, ops, reader.kernels, progress)
    embedding = reader.read("model.embed_tokens.weight").to(reader.torch_dtype)
    parts = embedding, layers, reader.read("model.norm.weight").float(), _identity
    model: Model
    if isinstance(ops, NativeOps) and can_fuse(layers):
        model = FusedDecoder(c, ops, *parts)
    else:
        model = Decoder(c, ops, *parts)
    return DecoderEncoder(model, c, reader.torch_dtype)


def _identity(x: torch.Tensor, add_to: torch.Tensor | None = None) -> torch.Tensor:
    """Stand in for the output layer."""
    return x


class BlockLayout(NamedTuple):
    """Where a batch has its keys and values: each input in blocks of its own, one after the other."""

    blocks: int
    tables: np.ndarray  # [inputs, blocks of the longest one], int32; past its end, an input's last block is repeated
    slots: np.ndarray  # [tokens], int64: block · BLOCK_SIZE + offset


def block_layout(batch: PackedBatch) -> BlockLayout:
    lengths = batch.lengths
    counts = -(-lengths // BLOCK_SIZE)
    first = np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int32)
    last = (first + counts - 1)[:, None]
    tables = np.minimum(first[:, None] + np.arange(int(counts.max())), last).astype(np.int32)
    slots = np.repeat(first, lengths).astype(np.int64) * BLOCK_SIZE + batch.positions
    return BlockLayout(int(counts.sum()), tables, slots)


def _step_tensors(batch: PackedBatch, layout: BlockLayout) -> StepTensors:
    """Lay out a batch like a step of a decoder."""
    return StepTensors(
        tokens=torch.from_numpy(batch.tokens.astype(np.int64)),
        positions=torch.from_numpy(batch.positions),
        slot_mapping=torch.from_numpy(layout.slots),
        row_starts=torch.from_numpy(batch.starts),
        first_positions=torch.zeros(len(batch), dtype=torch.int32),
        block_tables=torch.from_numpy(layout.tables),
        logit_rows=torch.arange(len(batch.tokens)),
    )
