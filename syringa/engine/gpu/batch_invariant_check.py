"""Load-time check that the kernels of `--deterministic` are batch-invariant on this GPU, with the model's weights."""

from __future__ import annotations

import torch
from triton.runtime.errors import OutOfResources

from syringa.engine.gpu.decoder import GpuDecoder, GpuMlp
from syringa.engine.gpu.kernels.batch_invariant_matmul import (
    DESCRIBED_CONFIGS,
    TILED_CONFIGS,
    TiledMatmulConfig,
    batch_invariant_matmul,
    loads_by_descriptors,
)
from syringa.engine.gpu.kernels.prefill_attention import prefill_attention, query_tiles
from syringa.engine.gpu.ops.base import GpuOps
from syringa.engine.loading.loaded_model import LoadedModel
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.errors import ConfigError

ROWS = 300  # more than the rows of any tile
SMALL_BATCHES = (1, 2, 16, 17, 33, 64)  # row counts that select other tiles
OUTLIER_STRIDE = 97  # every n-th input is large
LENGTH = 150  # tokens of the test sequence: several key blocks, the last one partial
CHUNK = 37  # tokens


@torch.inference_mode()
def check_batch_invariance(loaded: LoadedModel) -> None:
    """Raise `ConfigError` if a row's result depends on the other rows, or if the kernels do not fit the GPU."""
    assert loaded.gpu is not None
    decoder = loaded.gpu.decoder
    assert isinstance(decoder, GpuDecoder)
    try:
        _check(decoder, loaded.gpu.shape.dtype)
    except OutOfResources as error:
        raise ConfigError(f"--deterministic: its kernels do not fit this GPU ({error}); leave it out") from None


def _check(decoder: GpuDecoder, cache: torch.dtype) -> None:
    layer = decoder.layers[0]
    assert isinstance(layer.mlp, GpuMlp)  # experts are refused before
    for linear in (layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down):
        assert isinstance(linear.weight, torch.Tensor)  # so are quantized weights
        if not matmul_is_batch_invariant(linear.weight, linear.bias):
            outputs, inputs = linear.weight.shape
            raise _not_batch_invariant(f"matmuls with {outputs} × {inputs} weights")
    if not matmul_is_batch_invariant(decoder.head, None, torch.float32):
        raise _not_batch_invariant("logits")
    heads, kv_heads, size = decoder.config.heads, decoder.config.kv_heads, decoder.config.head_size
    for window in sorted({layer.window for layer in decoder.layers}):
        if not attention_is_batch_invariant(decoder.ops, heads, kv_heads, size, window, decoder.embedding, cache):
            raise _not_batch_invariant("attention")


def matmul_is_batch_invariant(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None
) -> bool:
    """Return whether all tile configurations give a row the same bits. Also compiles all of them."""
    x = random_like(weight, ROWS, weight.shape[1])
    x[:, ::OUTLIER_STRIDE] *= 100  # as in real models: summation order shows where magnitudes differ

    def matmul(rows: torch.Tensor, config: TiledMatmulConfig | None = None) -> torch.Tensor:
        out = torch.empty(len(rows), len(weight), dtype=dtype or weight.dtype, device=weight.device)
        return batch_invariant_matmul(rows, weight, bias, out, config)

    first, *others = DESCRIBED_CONFIGS if loads_by_descriptors(weight) else TILED_CONFIGS
    whole = matmul(x, first)
    same = all(torch.equal(matmul(x, config), whole) for config in others)
    return same and all(
        torch.equal(matmul(x[:rows]), whole[:rows]) and torch.equal(matmul(x[-rows:]), whole[-rows:])
        for rows in SMALL_BATCHES
    )


def attention_is_batch_invariant(
    ops: GpuOps, heads: int, kv_heads: int, size: int, window: int, like: torch.Tensor, cache: torch.dtype
) -> bool:
    """Return whether a sequence's rows get the same bits as one prefill, in chunks, and as decode steps.

    `like`: of the dtype of the rows; `cache`: the dtype of keys and values.
    """
    blocks = -(-LENGTH // BLOCK_SIZE)
    keys, values = (random_like(like, blocks, kv_heads, BLOCK_SIZE, size, seed=seed).to(cache) for seed in (1, 2))
    table = torch.arange(blocks, dtype=torch.int32, device=like.device).flip(0)[None]
    q = random_like(like, LENGTH, heads * size, seed=3)

    def prefill(begin: int, end: int) -> torch.Tensor:
        starts = torch.tensor([0, end - begin], dtype=torch.int32, device=like.device)
        first = torch.tensor([begin], dtype=torch.int32, device=like.device)
        tiles = query_tiles([0, end - begin], [begin]).to(like.device)
        return prefill_attention(q[begin:end], keys, values, table, tiles, starts, first, heads, window=window)

    whole = prefill(0, LENGTH)
    chunks = torch.cat([prefill(at, min(at + CHUNK, LENGTH)) for at in range(0, LENGTH, CHUNK)])
    lengths = torch.arange(1, LENGTH + 1, dtype=torch.int32, device=like.device)
    decoded = ops.decode_attention(q, keys, values, table.repeat(LENGTH, 1), lengths, heads, window, None)
    return torch.equal(whole, chunks) and torch.equal(whole, decoded)


def random_like(like: torch.Tensor, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=like.device, dtype=like.dtype)


def _not_batch_invariant(what: str) -> ConfigError:
    return ConfigError(f"--deterministic: on this GPU the bits of {what} depend on the batch; leave it out")
