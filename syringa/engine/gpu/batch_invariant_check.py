"""Whether this GPU keeps what `--deterministic` promises: tried out on a model's own weights, before it serves."""

from __future__ import annotations

import torch
from triton.runtime.errors import OutOfResources

from syringa.engine.gpu.decoder import GpuDecoder
from syringa.engine.gpu.kernels.batch_invariant_matmul import WIDE, WideConfig, product
from syringa.engine.gpu.kernels.prefill_attention import prefill_attention, query_tiles
from syringa.engine.gpu.ops.base import Ops
from syringa.engine.loading.loader import LoadedModel
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE
from syringa.errors import ConfigError

ROWS = 300  # more than any tile has
FEW = (1, 2, 16, 17, 33, 64)  # rows, for which other tiles are chosen
OUTLIERS = 97  # every so many inputs one is large
LENGTH = 150  # tokens of a sequence: several rounds of keys, the last not whole
CHUNK = 37


@torch.inference_mode()
def check_steady(loaded: LoadedModel) -> None:
    """Raises `ConfigError` if a row's bits depend on the rows beside it, or if the kernels do not fit the GPU."""
    assert loaded.gpu is not None
    decoder = loaded.gpu.decoder
    assert isinstance(decoder, GpuDecoder)
    try:
        _check(decoder)
    except OutOfResources as error:
        raise ConfigError(f"--deterministic: its kernels do not fit this GPU ({error}); leave it out") from None


def _check(decoder: GpuDecoder) -> None:
    layer = decoder.layers[0]
    for by in (layer.qkv, layer.out, layer.gate_up, layer.down):
        if not products_agree(by.weight, by.bias):
            raise _unsteady(f"products of {by.weight.shape[0]} × {by.weight.shape[1]} weights")
    if not products_agree(decoder.head, None, torch.float32):
        raise _unsteady("logits")
    heads, kv_heads, size = decoder.config.heads, decoder.config.kv_heads, decoder.config.head_size
    for window in sorted({layer.window for layer in decoder.layers}):
        if not attention_agrees(decoder.ops, heads, kv_heads, size, window, decoder.embedding):
            raise _unsteady("attention")


def products_agree(weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None) -> bool:
    """Whether all tiles that may be chosen give a row the same bits: by the way, all are compiled."""
    x = _random(weight, ROWS, weight.shape[1])
    x[:, ::OUTLIERS] *= 100  # as in real models: sums of numbers of very different sizes are where orders show

    def times(rows: torch.Tensor, config: WideConfig | None = None) -> torch.Tensor:
        out = torch.empty(len(rows), len(weight), dtype=dtype or weight.dtype, device=weight.device)
        return product(rows, weight, bias, out, config)

    first, *others = WIDE
    whole = times(x, first)
    same = all(torch.equal(times(x, config), whole) for config in others)
    return same and all(
        torch.equal(times(x[:rows]), whole[:rows]) and torch.equal(times(x[-rows:]), whole[-rows:]) for rows in FEW
    )


def attention_agrees(ops: Ops, heads: int, kv_heads: int, size: int, window: int, like: torch.Tensor) -> bool:
    """Whether a sequence's rows get the same bits all at once, a few at a time, and one by one."""
    blocks = -(-LENGTH // BLOCK_SIZE)
    keys, values = (_random(like, blocks, kv_heads, BLOCK_SIZE, size, seed=seed) for seed in (1, 2))
    table = torch.arange(blocks, dtype=torch.int32, device=like.device).flip(0)[None]
    q = _random(like, LENGTH, heads * size, seed=3)

    def chunk(begin: int, end: int) -> torch.Tensor:
        starts = torch.tensor([0, end - begin], dtype=torch.int32, device=like.device)
        first = torch.tensor([begin], dtype=torch.int32, device=like.device)
        tiles = query_tiles([0, end - begin], [begin]).to(like.device)
        return prefill_attention(q[begin:end], keys, values, table, tiles, starts, first, heads, window=window)

    whole = chunk(0, LENGTH)
    chunks = torch.cat([chunk(at, min(at + CHUNK, LENGTH)) for at in range(0, LENGTH, CHUNK)])
    lengths = torch.arange(1, LENGTH + 1, dtype=torch.int32, device=like.device)
    rows = ops.decode_attention(q, keys, values, table.repeat(LENGTH, 1), lengths, heads, window, None)
    return torch.equal(whole, chunks) and torch.equal(whole, rows)


def _random(like: torch.Tensor, *shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=like.device, dtype=like.dtype)


def _unsteady(what: str) -> ConfigError:
    return ConfigError(f"--deterministic: on this GPU the bits of {what} depend on the batch; leave it out")
