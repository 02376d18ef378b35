"""The native decoder on a CPU: one definition for all families, driven by `DecoderConfig`."""

from __future__ import annotations

from typing import Protocol

import torch

from syringa.engine.cpu.layers.cache import CacheTensors
from syringa.engine.cpu.layers.linear import LinearLayer
from syringa.engine.cpu.layers.ops import CpuOps
from syringa.engine.execution.batch import StepTensors
from syringa.engine.models.config import DecoderConfig
from syringa.engine.models.layers import DecoderLayer


class Embedding(Protocol):
    def __getitem__(self, tokens: torch.Tensor) -> torch.Tensor: ...


class Model(Protocol):
    """Interface of a model, native or on transformers' definition."""

    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        """Return the logits of `step.logit_rows`, fp32."""
        ...


class Decoder:
    """The native decoder, one operation after the other.

    All of them work row by row or sequence by sequence, so that with the compiled kernels the bits of a token do not
    depend on the batch it is computed in.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: CpuOps,
        embedding: Embedding,
        layers: list[DecoderLayer],
        norm: torch.Tensor,
        head: LinearLayer,
    ) -> None:
        self.config = config
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.norm = norm
        self.head = head

    @torch.inference_mode()
    def forward(self, step: StepTensors, cache: CacheTensors) -> torch.Tensor:
        ops, eps = self.ops, self.config.eps
        x = self.embed(step.tokens)
        for layer in self.layers:
            kept = step.logit_rows if layer is self.layers[-1] else None  # only keys, values and states need all rows
            x = layer.mixer(ops.rms_norm(x, layer.input_norm, eps), x, step, cache, kept)
            layer.mlp(ops.rms_norm(x, layer.post_norm, eps), x)
        return self.logits(x)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the first residuals, fp32."""
        x = self.embedding[tokens].float()
        return x if self.config.embedding_scale == 1.0 else x * self.config.embedding_scale

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.ops.rms_norm(x, self.norm, self.config.eps))
        if cap := self.config.logit_softcap:
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits
