"""Decoders as encoders of texts on a GPU: the hidden states of the native GPU decoder.

As in `decoder.py`, all layers share the blocks of one, which live for a step. All inputs are prefill rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from syringa.engine.embedding.batch import PackedBatch
from syringa.engine.embedding.decoder import BlockLayout, block_layout
from syringa.engine.embedding.weights import LayerReader
from syringa.engine.gpu.cache import GpuCache, GpuCacheShape
from syringa.engine.gpu.decoder import GpuDecoder, ModelInput, PrefillInput
from syringa.engine.gpu.loading import load_gpu_decoder
from syringa.engine.gpu.ops.base import GpuOps
from syringa.engine.gpu.transfer import upload
from syringa.engine.loading.weights import WeightSource
from syringa.engine.models.config import read_config
from syringa.engine.models.tensor_shapes import check_shapes


class GpuDecoderEncoder:
    """A decoder without its output layer on a GPU. Attention is causal."""

    def __init__(self, decoder: GpuDecoder) -> None:
        self.decoder = decoder
        c = decoder.config
        self._shape = GpuCacheShape(1, c.kv_heads, c.head_size, decoder.embedding.dtype, decoder.device)
        self._cache: GpuCache | None = None
        self._blocks = 0
        self._no_tokens = torch.zeros(1, dtype=torch.int64, device=decoder.device)  # that a step has sampled before

    @torch.inference_mode()
    def encode(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden state of each token, fp32."""
        layout = block_layout(batch)
        cache = self._reserve(layout.blocks)
        return self.decoder.hidden_states(self._rows(batch, layout), self._no_tokens, cache).float()

    def _rows(self, batch: PackedBatch, layout: BlockLayout) -> ModelInput:
        first = np.zeros(len(batch), dtype=np.int32)
        tiles = self.decoder.ops.plan_prefill(batch.starts.tolist(), first.tolist())
        arrays = [
            batch.tokens,
            np.full_like(batch.tokens, -1),
            layout.slots.astype(np.int32),
            layout.tables,
            batch.positions,
            tiles,
            batch.starts,
            first,
        ]
        token, source, slot, table, position, tile, start, begin = upload(arrays, self.decoder.device)
        prefill = PrefillInput(position, table, tile, start, begin)
        return ModelInput(token, source, slot, table[:0], begin[:0], prefill)

    def _reserve(self, blocks: int) -> GpuCache:
        if self._cache is None or blocks > self._blocks:
            self._cache = None  # before the new one is allocated
            cache = self._shape.allocate(blocks)
            cache.layers *= self.decoder.config.layers
            self._cache, self._blocks = cache, blocks
        return self._cache


def load_gpu_decoder_encoder(
    weights: WeightSource,
    config: dict[str, Any],
    reader: LayerReader,
    length: int,
    progress: Callable[[], None] = lambda: None,
    ops: GpuOps | None = None,
) -> GpuDecoderEncoder:
    """Load a decoder of the native families to the reader's device, without its output layer. Raises `ModelError`.

    `ops`: by default, those of the device.
    """
    c = replace(read_config(config), tied=True)  # there is no output layer, tied or not
    check_shapes(c, weights, reader.path)
    decoder = load_gpu_decoder(c, reader.read, reader.device, length, dtype=reader.torch_dtype, ops=ops, tick=progress)
    return GpuDecoderEncoder(decoder)
