"""The native encoder: one definition for BERT, RoBERTa and XLM-R, driven by `EncoderConfig`.

The tokens of a step are rows of one matrix; only attention knows where an input ends. `Encoder` runs fp32 and bf16, on
the compiled kernels or in PyTorch. `native_ops.FusedEncoder` runs int8, and `gpu_encoder.GpuEncoder` runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.cpu.layers.linear import LinearLayer
from syringa.engine.embedding.batch import PackedBatch, similar_lengths
from syringa.engine.embedding.encoder_config import EncoderConfig
from syringa.engine.models.layers import ReadWeight

LinearFactory = Callable[[Sequence[str], torch.Tensor | None], LinearLayer]
"""Creates a linear layer of the chosen dtype from the tensors with these names, side by side."""

MAX_PADDED_TOKENS = 1 << 16  # of a call of PyTorch's attention


class Norm(NamedTuple):
    """A layer norm, in fp32."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float


class EncoderOps(Protocol):
    """The operations between the linear layers. Rows are fp32."""

    def layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor: ...

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(x), in the memory of x where possible."""
        ...

    def attention(self, qkv: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """Return the attention of rows `[q | k | v]`, each input within itself, as `[tokens, hidden]`."""
        ...


class TorchEncoderOps:
    """`EncoderOps` in PyTorch: the reference, and the fallback without compiled kernels."""

    def __init__(self, config: EncoderConfig, dtype: torch.dtype) -> None:
        """`dtype`: of queries, keys and values."""
        self.config, self.dtype = config, dtype

    def layer_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias, norm.eps)

    def gelu(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x)

    def attention(self, qkv: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        c = self.config
        out = torch.empty(len(qkv), c.hidden, device=qkv.device)
        lengths: list[int] = batch.lengths.tolist()
        for group in similar_lengths(lengths, MAX_PADDED_TOKENS):
            rows, present = _padded_rows(batch, group, lengths)
            index, mask = torch.from_numpy(rows).to(qkv.device), torch.from_numpy(present).to(qkv.device)
            heads = qkv[index].to(self.dtype).unflatten(-1, (3, c.heads, c.head_size))  # [inputs, length, 3, …]
            q, k, v = heads.permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
            out[index[mask]] = attended.transpose(1, 2).flatten(2)[mask].float()
        return out


def _padded_rows(batch: PackedBatch, group: Sequence[int], lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of inputs padded to the longest with their first row, and which of them are no padding."""
    at = np.arange(max(lengths[index] for index in group))[None]
    present = at < np.array([lengths[index] for index in group])[:, None]
    first = batch.starts[list(group)].astype(np.int64)[:, None]
    return np.where(present, first + at, first), present


@dataclass
class EncoderLayer:
    qkv: LinearLayer
    out: LinearLayer
    attention_norm: Norm
    up: LinearLayer
    down: LinearLayer
    output_norm: Norm


@dataclass
class EncoderEmbedding:
    """The tables of tokens, in fp32 or bf16, and of positions and types, in fp32, and the norm of their sum."""

    tokens: torch.Tensor
    positions: torch.Tensor
    types: torch.Tensor
    norm: Norm


class Encoder:
    def __init__(
        self, config: EncoderConfig, ops: EncoderOps, embedding: EncoderEmbedding, layers: list[EncoderLayer]
    ) -> None:
        self.config, self.ops, self.embedding, self.layers = config, ops, embedding, layers
        self.hidden = config.hidden

    @torch.inference_mode()
    def encode(self, batch: PackedBatch) -> torch.Tensor:
        """Return the last hidden state of each token, fp32."""
        ops, tables, device = self.ops, self.embedding, self.embedding.tokens.device

        def rows(table: torch.Tensor, index: np.ndarray) -> torch.Tensor:
            return F.embedding(torch.from_numpy(index).to(device), table).float()

        types = rows(tables.types, token_types(self.config, batch))
        x = rows(tables.tokens, batch.tokens) + types + rows(tables.positions, position_ids(self.config, batch))
        x = ops.layer_norm(x, tables.norm)
        for layer in self.layers:
            layer.out(ops.attention(layer.qkv(x), batch), add_to=x)
            x = ops.layer_norm(x, layer.attention_norm)
            layer.down(ops.gelu(layer.up(x)), add_to=x)
            x = ops.layer_norm(x, layer.output_norm)
        return x


def position_ids(config: EncoderConfig, batch: PackedBatch) -> np.ndarray:
    """Return the row of each token in the table of positions."""
    if config.padding < 0:
        return batch.positions
    counted = (batch.tokens != config.padding).astype(np.int32)
    totals = np.cumsum(counted, dtype=np.int32)
    before = np.repeat(totals[batch.starts[:-1]] - counted[batch.starts[:-1]], batch.lengths)
    positions: np.ndarray = (totals - before) * counted + np.int32(config.padding)
    return positions


def token_types(config: EncoderConfig, batch: PackedBatch) -> np.ndarray:
    """Return the row of each token in the table of types. Models with one type do not tell the texts of a pair."""
    return batch.types if config.types > 1 else np.zeros_like(batch.types)


def load_embedding(config: EncoderConfig, read: ReadWeight, dtype: torch.dtype) -> EncoderEmbedding:
    """Read the embedding, that of tokens in `dtype`."""
    return EncoderEmbedding(
        tokens=read("embeddings.word_embeddings.weight").to(dtype).contiguous(),
        positions=read("embeddings.position_embeddings.weight").float().contiguous(),
        types=read("embeddings.token_type_embeddings.weight").float().contiguous(),
        norm=_norm(config, read, "embeddings"),
    )


def load_layers(
    config: EncoderConfig,
    read: ReadWeight,
    make_linear: LinearFactory,
    make_fine_linear: LinearFactory,
    progress: Callable[[], None] = lambda: None,
) -> list[EncoderLayer]:
    """Read the layers one by one, fusing q, k and v. `make_fine_linear`: of the layer that is most sensitive."""
    layers = []
    for i in range(config.layers):
        prefix = f"encoder.layer.{i}."

        def linear(*names: str, make: LinearFactory = make_linear, prefix: str = prefix) -> LinearLayer:
            bias = torch.cat([read(f"{prefix}{name}.bias") for name in names])
            return make([f"{prefix}{name}.weight" for name in names], bias)

        layers.append(
            EncoderLayer(
                qkv=linear("attention.self.query", "attention.self.key", "attention.self.value"),
                out=linear("attention.output.dense"),
                attention_norm=_norm(config, read, f"{prefix}attention.output"),
                up=linear("intermediate.dense"),
                down=linear("output.dense", make=make_fine_linear),
                output_norm=_norm(config, read, f"{prefix}output"),
            )
        )
        progress()
    return layers


def _norm(config: EncoderConfig, read: ReadWeight, prefix: str) -> Norm:
    weight, bias = (read(f"{prefix}.LayerNorm.{name}").float().contiguous() for name in ("weight", "bias"))
    return Norm(weight, bias, config.eps)


def encoder_shapes(c: EncoderConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors, without the prefix of a model with a head."""
    norm = {"LayerNorm.weight": (c.hidden,), "LayerNorm.bias": (c.hidden,)}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (c.vocab, c.hidden),
        "embeddings.position_embeddings.weight": (c.positions, c.hidden),
        "embeddings.token_type_embeddings.weight": (c.types, c.hidden),
        **{f"embeddings.{name}": shape for name, shape in norm.items()},
    }
    linears = {
        **{f"attention.self.{name}": (c.hidden, c.hidden) for name in ("query", "key", "value")},
        "attention.output.dense": (c.hidden, c.hidden),
        "intermediate.dense": (c.intermediate, c.hidden),
        "output.dense": (c.hidden, c.intermediate),
    }
    for i in range(c.layers):
        prefix = f"encoder.layer.{i}."
        for name, (outputs, inputs) in linears.items():
            shapes |= {f"{prefix}{name}.weight": (outputs, inputs), f"{prefix}{name}.bias": (outputs,)}
        for place in ("attention.output", "output"):
            shapes |= {f"{prefix}{place}.{name}": shape for name, shape in norm.items()}
    return shapes
