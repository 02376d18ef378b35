"""Every built variant of the kernels compared with PyTorch, and each row with itself in other batches."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from ctypes import byref
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from syringa.engine.cpu import native
from syringa.engine.cpu.features import cpu_flags
from syringa.engine.cpu.layers.cache import CacheTensors, LayerCache, write_cache
from syringa.engine.cpu.layers.linear import DenseLinear, Gate, Int8Linear
from syringa.engine.cpu.layers.native_ops import address, attend
from syringa.engine.cpu.native import (
    AVX2,
    AVX512,
    FOLDER,
    GATES,
    REQUIRED_FLAGS,
    AttentionShape,
    Kernels,
    RotaryShape,
    load_kernels,
)
from syringa.engine.execution.batch import StepTensors
from syringa.engine.scheduling.kv_cache import BLOCK_SIZE

VARIANTS = [
    name for name, flags in REQUIRED_FLAGS.items() if flags <= cpu_flags() and (FOLDER / f"kernels_{name}.so").exists()
]
GROUP = 64  # in int8_linear.h
DTYPES = [torch.float32, torch.bfloat16]
pytestmark = pytest.mark.skipif(not VARIANTS, reason="no kernels were built: there was no compiler")


@functools.cache
def variant(name: str) -> Kernels:
    return Kernels(name, ctypes.CDLL(str(FOLDER / f"kernels_{name}.so")), 2)


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Each library has its own threads, so all variants can be loaded in one process."""
    return variant(request.param)


@pytest.fixture(autouse=True)
def _seed_and_single_thread() -> Iterator[None]:
    """Seed the random numbers, and limit torch's threads, which would compete with those of the kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def test_load_kernels_returns_best_variant() -> None:
    chosen = load_kernels(2)
    assert chosen is not None
    assert chosen.variant == VARIANTS[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "fma", "f16c", "avx_vnni"}, "avxvnni"),
        ({"avx2", "fma", "f16c"}, "avx2"),
        (AVX512 | AVX2, "avx512"),
        (AVX512 | AVX2 | {"avx_vnni", "avx512_bf16"}, "avx512bf16"),
        ({"asimd"}, "base"),
    ],
)
def test_kernel_variant_is_the_best_for_the_processor(
    flags: set[str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    monkeypatch.setattr(native, "cpu_flags", lambda: flags)
    assert native.kernel_variant() is None
    for name in REQUIRED_FLAGS:
        (tmp_path / f"kernels_{name}.so").touch()
    assert native.kernel_variant() == expected
    (tmp_path / "kernels_avxvnni.so").unlink()  # the compiler was too old for it
    assert native.kernel_variant() == expected.replace("avxvnni", "avx2")


# --- int8_linear.h


def quantized_product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return the product with the same quantization in exact arithmetic."""
    outputs, inputs = w.shape
    peaks = w.abs().amax(1)
    inverse = torch.where(peaks > 0, 127 / peaks, 0)
    bytes_w = (w * inverse[:, None]).round()
    total = torch.zeros(len(x), outputs, dtype=torch.float64)
    for begin in range(0, inputs, GROUP):
        part = x[:, begin : begin + GROUP]
        peak = part.abs().amax(1)
        scale = torch.where(peak > 0, 127 / peak, 0)
        bytes_x = (part.double() * scale[:, None].double()).round()  # a fused multiply-add rounds once
        total += (bytes_x @ bytes_w[:, begin : begin + GROUP].double().T) * (peak / 127).double()[:, None]
    return total * (peaks / 127).double()


SIZES = [(1, 1), (31, 63), (32, 64), (33, 65), (75, 200), (576, 576), (160, 1536), (1000, 130)]


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_int8_linear_matches_quantized_product(kernels: Kernels, outputs: int, inputs: int, rows: int) -> None:
    w, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    y = Int8Linear(kernels, w, None)(x)
    expected = quantized_product(x, w)
    magnitude = expected.abs().max()
    assert (y - expected).abs().max() <= 2e-6 * magnitude
    exact = x.double() @ w.double().T
    # Rounding errors of x and w add up as a random walk: about 0.6 % of a random product's size.
    assert (y - exact).pow(2).mean().sqrt() <= 0.02 * inputs**0.5


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_int8_linear_with_bias_and_residual_is_batch_invariant(kernels: Kernels, bias: bool, add: bool) -> None:
    w, x, b, residual = torch.randn(75, 200), torch.randn(21, 200), torch.randn(75), torch.randn(21, 75)
    layer = Int8Linear(kernels, w, b if bias else None)
    expected = quantized_product(x, w) + (b if bias else 0) + (residual if add else 0)
    target = residual.clone()
    y = layer(x, add_to=target if add else None)
    assert (y.data_ptr() == target.data_ptr()) == add
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-4)
    for rows in range(1, 10):  # every tile size and offset
        for first in range(0, 12, 3):
            some = slice(first, first + rows)
            alone = layer(x[some].clone(), add_to=residual[some].clone() if add else None)
            assert torch.equal(alone, y[some])


def test_int8_linear_with_outliers_and_zero_rows(kernels: Kernels) -> None:
    w = torch.randn(40, 192)
    w[3] = 0
    x = torch.randn(3, 192)
    x[0] = 0
    x[1, 5] = 1e4  # costs precision in its own group and row only
    y = Int8Linear(kernels, w, None)(x)
    assert torch.equal(y[0], torch.zeros(40))
    assert torch.equal(y[:, 3], torch.zeros(3))
    assert (y - quantized_product(x, w)).abs().max() <= 2e-6 * y.abs().max()
    assert torch.equal(y[2:], Int8Linear(kernels, w, None)(x[2:].clone()))


@pytest.mark.skipif("avx2" not in VARIANTS or VARIANTS[0] == "avx2", reason="needs AVX2 and another variant")
def test_int8_linear_has_equal_bits_in_all_variants_from_avx2_on() -> None:
    w, x = torch.randn(75, 200), torch.randn(11, 200)
    w[3], x[4] = 1.0, -1.0  # the largest bytes with the smallest ones
    expected = Int8Linear(variant("avx2"), w, None)(x)
    for name in VARIANTS[: VARIANTS.index("avx2")]:
        assert torch.equal(Int8Linear(variant(name), w, None)(x), expected), name


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_int8_linear_of_no_number_is_no_number(kernels: Kernels, number: float) -> None:
    layer = Int8Linear(kernels, torch.randn(40, 192), None)
    for position in (0, 63, 64, 100, 191):
        x = torch.zeros(3, 192)
        x[1, position] = number
        assert (~layer(x).isfinite()).all(1).tolist() == [False, True, False]


def test_int8_linear_large_batch_matches_small_batches(kernels: Kernels) -> None:
    layer = Int8Linear(kernels, torch.randn(200, 1536), None)
    x = torch.randn(300, 1536)
    whole = layer(x)
    for rows in (1, 2, 3, 4, 7, 64, 171):
        assert torch.equal(layer(x[-rows:].clone()), whole[-rows:])


# --- dense_linear.h


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_dense_linear_matches_torch(kernels: Kernels, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    w, x = torch.randn(outputs, inputs), torch.randn(45, inputs)
    y = DenseLinear(kernels, w, None, dtype)(x)
    expected = x.double() @ w.to(dtype).double().T
    assert (y - expected).abs().max() <= 1e-5 * inputs**0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_dense_linear_is_batch_invariant(kernels: Kernels, dtype: torch.dtype, bias: bool, add: bool) -> None:
    w, x, b, residual = torch.randn(75, 3000), torch.randn(70, 3000), torch.randn(75), torch.randn(70, 75)
    layer = DenseLinear(kernels, w, b if bias else None, dtype)
    expected = x.double() @ w.to(dtype).double().T + (b if bias else 0) + (residual if add else 0)
    y = layer(x, add_to=residual.clone() if add else None)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-3)
    for rows in [*range(1, 18), 33, 64]:
        some = slice(70 - rows, 70)
        assert torch.equal(layer(x[some].clone(), add_to=residual[some].clone() if add else None), y[some])


# --- rowwise.h


@pytest.mark.parametrize("size", [1, 15, 16, 100, 576])
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_rms_norm_matches_torch(kernels: Kernels, size: int, rows: int) -> None:
    x, weight, y = torch.randn(rows, size) * 3, torch.randn(size), torch.empty(rows, size)
    kernels.rms_norm(x.data_ptr(), weight.data_ptr(), rows, size, 1e-5, y.data_ptr())
    exact = x.double()
    expected = exact * (exact.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight
    torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-6)
    one = torch.empty(1, size)
    kernels.rms_norm(x[-1:].data_ptr(), weight.data_ptr(), 1, size, 1e-5, one.data_ptr())
    assert torch.equal(one, y[-1:])


@pytest.mark.parametrize("size", [1, 17, 64, 1536])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("gate", [Gate(), Gate("gelu_tanh"), Gate("clamped_swiglu", 1.702, 7.0)])
def test_gate_matches_torch(kernels: Kernels, size: int, rows: int, gate: Gate) -> None:
    x, y = torch.randn(rows, 2 * size) * 8, torch.empty(rows, size)
    x[0, 0] = -200.0  # exp overflows a float here
    arguments = GATES[gate.kind], gate.alpha, gate.limit
    kernels.gate(x.data_ptr(), rows, size, *arguments, y.data_ptr())
    g, u = x.double().chunk(2, dim=-1)
    if gate.kind == "silu":
        expected = F.silu(g) * u
    elif gate.kind == "gelu_tanh":
        expected = F.gelu(g, approximate="tanh") * u
    else:
        g, u = g.clamp(max=7.0), u.clamp(-7.0, 7.0)
        expected = g * torch.sigmoid(1.702 * g) * (u + 1)
    torch.testing.assert_close(y, expected.float(), rtol=2e-5, atol=2e-6)
    one = torch.empty(1, size)
    kernels.gate(x[-1:].data_ptr(), 1, size, *arguments, one.data_ptr())
    assert torch.equal(one, y[-1:])


def cache_of(blocks: int, kv_heads: int, size: int, dtype: torch.dtype, fill: float = 0.0) -> LayerCache:
    tensors = CacheTensors(1, blocks, kv_heads, size, dtype)
    tensors.keys.fill_(fill)
    tensors.values.fill_(fill)
    return tensors.layers[0]


def slots_of(table: list[int], begin: int, end: int) -> torch.Tensor:
    return torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(begin, end)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotary", [0, 16, 32])
def test_rotary_and_cache_matches_torch(kernels: Kernels, dtype: torch.dtype, normed: bool, rotary: int) -> None:
    heads, kv_heads, size, blocks = 6, 2, 32, 8
    slots = torch.cat([slots_of([5, 2], 3, 23), slots_of([7], 0, 11), slots_of([1], 8, 9), slots_of([0, 6, 3], 7, 48)])
    rows = len(slots)
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * size)
    positions = torch.randint(0, 100, (rows,), dtype=torch.int32)
    angles = torch.randn(100, rotary // 2)
    cosine, sine = angles.cos().contiguous(), angles.sin().contiguous()
    norms = (torch.rand(size) + 0.5, torch.rand(size) + 0.5) if normed else None

    q, k, v = qkv.clone().view(rows, -1, size).split([heads, kv_heads, kv_heads], dim=1)

    def rotate(x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        if norm is not None:
            x = torch.nn.functional.rms_norm(x, (size,), norm, 1e-5)
        c, s = cosine[positions.long()][:, None], sine[positions.long()][:, None]
        a, b, rest = x.split([rotary // 2, rotary // 2, size - rotary], dim=-1)
        return torch.cat([a * c - b * s, b * c + a * s, rest], dim=-1)

    q, k = rotate(q, norms[0] if norms else None), rotate(k, norms[1] if norms else None)
    cache, expected = (cache_of(blocks, kv_heads, size, dtype, 9.0) for _ in range(2))
    kernels.rotary_and_cache(
        byref(RotaryShape(heads, kv_heads, size, rotary, 1e-5)),
        *(
            qkv.data_ptr(),
            qkv.shape[1],
            rows,
            positions.data_ptr(),
            slots.data_ptr(),
            cosine.data_ptr(),
            sine.data_ptr(),
        ),
        *((norms[0].data_ptr(), norms[1].data_ptr()) if norms else (None, None)),
        *(cache.keys.data_ptr(), cache.values.data_ptr(), dtype == torch.bfloat16),
    )
    torch.testing.assert_close(qkv.view(rows, -1, size)[:, :heads], q, rtol=1e-5, atol=1e-6)
    # Against its own rows the cache is exact: rounding to bf16 is the only step in between.
    rows_out = qkv.view(rows, -1, size)
    write_cache(expected, rows_out[:, heads : heads + kv_heads], v, slots)
    torch.testing.assert_close(rows_out[:, heads : heads + kv_heads], k, rtol=1e-5, atol=1e-6)
    assert torch.equal(cache.keys, expected.keys)
    assert torch.equal(cache.values, expected.values)


# --- attention.h


class Paged:
    """Sequences of random queries, keys and values, scattered over a paged cache that held `stale` before."""

    def __init__(
        self,
        lengths: list[int],
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        window: int = 0,
        stale: float = 0.0,
        softcap: float = 0.0,
        sinks: bool = False,
    ) -> None:
        heads, kv_heads, size = shape
        counts = [-(-length // BLOCK_SIZE) for length in lengths]
        order = torch.randperm(sum(counts) + 3).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.cache = cache_of(sum(counts) + 3, kv_heads, size, dtype, stale)
        self.queries = [torch.randn(length, heads, size) for length in lengths]
        self.keys = [torch.randn(length, kv_heads, size).to(dtype) for length in lengths]
        self.values = [torch.randn(length, kv_heads, size).to(dtype) for length in lengths]
        for table, length, k, v in zip(self.tables, lengths, self.keys, self.values, strict=True):
            write_cache(self.cache, k, v, slots_of(table, 0, length))
        self.sinks = torch.randn(heads) if sinks else None
        self.shape = AttentionShape(heads, kv_heads, size, window, size**-0.5, softcap, address(self.sinks))
        self.window, self.softcap = window, softcap

    def native(self, kernels: Kernels, parts: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Return the output for each (sequence, first position, end position) of a batch."""
        q = torch.cat([self.queries[s][begin:end] for s, begin, end in parts]).flatten(1).contiguous()
        starts = torch.tensor([0, *(end - begin for _, begin, end in parts)]).cumsum(0).to(torch.int32)
        first = torch.tensor([begin for _, begin, _ in parts], dtype=torch.int32)
        width = max(len(self.tables[s]) for s, _, _ in parts)
        tables = [self.tables[s] + [0] * (width - len(self.tables[s])) for s, _, _ in parts]
        none = torch.empty(0)
        step = StepTensors(none, none, none, starts, first, torch.tensor(tables, dtype=torch.int32), none)
        out = torch.full_like(q, float("nan"))
        half = self.cache.keys.dtype == torch.bfloat16
        keys, values = self.cache.keys.data_ptr(), self.cache.values.data_ptr()
        attend(kernels, self.shape, step, keys, values, q, q.shape[1], out, half)
        return list(out.split([end - begin for _, begin, end in parts]))

    def expected(self, s: int) -> torch.Tensor:
        """Return the output of a whole sequence, computed by PyTorch."""
        group = self.shape.heads // self.shape.kv_heads
        q = self.queries[s].double().transpose(0, 1)
        k, v = (x[s].double().transpose(0, 1).repeat_interleave(group, 0) for x in (self.keys, self.values))
        at = torch.arange(q.shape[1])
        visible = at[None, :] <= at[:, None]
        if self.window:
            visible &= at[None, :] > at[:, None] - self.window
        scores = q @ k.transpose(1, 2) * self.shape.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is not None:
            sink = self.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sink], dim=-1)
        return (scores.softmax(-1)[..., : k.shape[1]] @ v).transpose(0, 1).flatten(1)


SHAPES = [(1, 1, 16), (4, 4, 32), (9, 3, 64), (6, 1, 80), (8, 2, 128), (14, 1, 48)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 1, 30, 100])
def test_attention_matches_torch_and_is_batch_invariant(
    kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype, window: int
) -> None:
    check_attention(kernels, [1, 150, 64, 17, 65], Paged([1, 150, 64, 17, 65], shape, dtype, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize(("softcap", "sinks"), [(2.0, False), (0.0, True), (1.0, True)])
def test_attention_with_soft_caps_and_sinks_matches_torch(
    kernels: Kernels, dtype: torch.dtype, window: int, softcap: float, sinks: bool
) -> None:
    lengths = [1, 150, 64, 17, 65]
    check_attention(kernels, lengths, Paged(lengths, (8, 2, 64), dtype, window, softcap=softcap, sinks=sinks))


def check_attention(kernels: Kernels, lengths: list[int], paged: Paged) -> None:
    """Compare sequences with PyTorch, and with themselves alone, in chunks and as decode rows."""
    dtype = paged.cache.keys.dtype
    parts = [(s, 0, length) for s, length in enumerate(lengths)]
    whole = paged.native(kernels, parts)
    # With bfloat16 products, queries and weights are rounded too.
    close = 3e-2 if kernels.variant == "avx512bf16" and dtype == torch.bfloat16 else 2e-5
    for s in range(len(lengths)):
        torch.testing.assert_close(whole[s].double(), paged.expected(s), rtol=0, atol=close)
    for s, length in enumerate(lengths):  # alone
        assert torch.equal(paged.native(kernels, [(s, 0, length)])[0], whole[s])
    chunks = [(1, 0, 5), (1, 5, 70), (1, 70, 149), (1, 149, 150)]
    assert torch.equal(torch.cat([paged.native(kernels, [part])[0] for part in chunks]), whole[1])
    # Decode: the last token of each sequence, in one batch and in another order.
    last = [(s, length - 1, length) for s, length in enumerate(lengths)]
    for part, out in zip(last[::-1], paged.native(kernels, last[::-1]), strict=True):
        assert torch.equal(out[0], whole[part[0]][-1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_ignores_stale_cache_contents(kernels: Kernels, dtype: torch.dtype) -> None:
    lengths = [40, 39, 1, 97]
    parts = [(s, 0, length) for s, length in enumerate(lengths)]
    found = []
    for stale in (0.0, 7.0, float("nan"), float("inf")):
        torch.manual_seed(1)
        found.append(torch.cat(Paged(lengths, (6, 3, 32), dtype, stale=stale).native(kernels, parts)))
        assert torch.equal(found[-1], found[0]), f"after {stale}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_decode_matches_prefill(kernels: Kernels, dtype: torch.dtype) -> None:
    """Token by token the cache holds less than after a chunk: unwritten positions must not matter."""
    length, shape = 70, (6, 3, 32)
    whole = Paged([length], shape, dtype)
    expected = whole.native(kernels, [(0, 0, length)])[0]
    growing = cache_of(len(whole.cache.keys), 3, 32, dtype, float("nan"))
    written, whole.cache = whole.cache, growing
    assert written is not growing
    for position in range(length):
        slot = slots_of(whole.tables[0], position, position + 1)
        write_cache(growing, whole.keys[0][position : position + 1], whole.values[0][position : position + 1], slot)
        assert torch.equal(whole.native(kernels, [(0, position, position + 1)])[0], expected[position : position + 1])
