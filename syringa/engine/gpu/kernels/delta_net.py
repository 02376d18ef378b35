# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Gated delta nets between their projections. `models.delta_rule` has the formulas, and is the reference.

Rows are `[q | k | v | z]` and, as part of them or apart, `[b | a]`. A decode step is two kernels: the convolution,
which also updates its state, and the delta rule with norm and output gate, which reads and writes each head's state
once. Both find their sequences by slots on the device, so one CUDA graph serves all. Prompts are computed in chunks of
`CHUNK` tokens: first the inverses of the triangular systems of all chunks and heads in parallel, then a scan over the
chunks of a sequence for each head and each block of its values. Products of fp32 numbers use TF32 unless the
activations are fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from syringa.engine.gpu.kernels.launch import pdl_launch_dependents, pdl_options, pdl_wait, shared_memory
from syringa.engine.gpu.state_rows import PrefillStates
from syringa.engine.models.delta_rule import CHUNK, L2_EPS, DeltaNetParameters
from syringa.engine.models.hybrid_config import DeltaNetShape

CONV_BLOCK, CONV_ROWS = 256, 8  # channels of a program, and rows of prompts
NORM_HEADS = 8  # heads that a program normalizes
# Values of a program of the scan; smaller ones where larger ones would leave multiprocessors idle.
VALUE_BLOCK, FEW_VALUE_BLOCK, FEW_HEADS = 64, 32, 128
# Shared memory of a scan with VALUE_BLOCK values. GPUs with less get FEW_VALUE_BLOCK, and load no chunk ahead.
SCAN_SHARED_MEMORY = 156 << 10
SUB_CHUNK = 16  # rows of a triangular system that are substituted one by one
# From so many heads of all rows on, a decode step splits heads into blocks of values: smaller programs overlap their
# loads with the stores of others, which gains more than the norm costs that then needs a launch of its own.
MANY_HEADS, DECODE_BLOCK, DECODE_WARPS = 256, 64, 4


@triton.jit
def _gates(gate_ptr, dt_bias_ptr, rate_ptr, head, mask, HEADS: tl.constexpr):
    """Return the logarithm of the decay and beta."""
    b = tl.load(gate_ptr + head, mask, 0.0).to(tl.float32)
    a = tl.load(gate_ptr + HEADS + head, mask, 0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    return tl.load(rate_ptr + head) * softplus, tl.sigmoid(b)


@triton.jit
def _conv_decode_kernel(
    x_ptr, weight_ptr, state_ptr, slots_ptr, lengths_ptr, out_ptr, x_stride, out_stride, slot_stride,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tap = tl.arange(0, TAPS)[:, None]  # the last of KERNEL is the new input
    inside = channel < CHANNELS
    weight = tl.load(weight_ptr + tap * CHANNELS + channel, inside & (tap < KERNEL), 0.0)
    pdl_wait(PDL)
    length = tl.load(lengths_ptr + row)
    if length > 0:
        state = state_ptr + tl.load(slots_ptr + row).to(tl.int64) * slot_stride
        old = tl.load(state + tap * CHANNELS + channel, inside & (tap < KERNEL - 1) & (length > 1), 0.0)
        new = tl.load(x_ptr + row * x_stride + channel, inside, 0.0).to(tl.float32)
        window = tl.where(tap == KERNEL - 1, new, old)
        y = tl.sum(window * weight, 0)[None, :]
        tl.store(out_ptr + row * out_stride + channel, (y * tl.sigmoid(y)).to(out_ptr.dtype.element_ty), inside)
        tl.debug_barrier()  # all inputs were read before one is overwritten
        tl.store(state + (tap - 1) * CHANNELS + channel, window, inside & (tap >= 1) & (tap < KERNEL))


@triton.jit
def _delta_decode_kernel(
    mixed_ptr, row_ptr, gate_ptr, state_ptr, rate_ptr, dt_bias_ptr, norm_ptr, slots_ptr, lengths_ptr, out_ptr,
    mixed_stride, row_stride, gate_stride, out_stride, slot_stride, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, L2: tl.constexpr,
    PADDED_KEYS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK values of a head; if these are all, its norm and gate as well."""
    pdl_launch_dependents(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    key, value = tl.arange(0, PADDED_KEYS), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.load(norm_ptr + value, value < VALUES, 0.0)
    pdl_wait(PDL)
    length = tl.load(lengths_ptr + row)
    out = out_ptr + row * out_stride + head * VALUES + value
    if length <= 0:
        tl.store(out, tl.zeros([BLOCK], out_ptr.dtype.element_ty), value < VALUES)
    else:
        channels: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
        slot = tl.load(slots_ptr + row).to(tl.int64)
        at = key[:, None] * VALUES + value[None, :]
        inside = (key[:, None] < KEYS) & (value[None, :] < VALUES)
        states = state_ptr + slot * slot_stride + head * KEYS * VALUES + at
        state = tl.load(states, inside & (length > 1), 0.0)
        mixed = mixed_ptr + row * mixed_stride
        key_head = head // (HEADS // KEY_HEADS)
        q = tl.load(mixed + key_head * KEYS + key, key < KEYS, 0.0).to(tl.float32)
        k = tl.load(mixed + (KEY_HEADS + key_head) * KEYS + key, key < KEYS, 0.0).to(tl.float32)
        v = tl.load(mixed + 2 * KEY_HEADS * KEYS + head * VALUES + value, value < VALUES, 0.0).to(tl.float32)
        q = q * tl.rsqrt((tl.sum(q * q) + L2) * KEYS)
        k = k * tl.rsqrt(tl.sum(k * k) + L2)
        decay, beta = _gates(gate_ptr + row * gate_stride, dt_bias_ptr, rate_ptr, head, length > 0, HEADS)
        state = state * tl.exp(decay)
        update = (v - tl.sum(state * k[:, None], 0)) * beta
        state += k[:, None] * update[None, :]
        tl.store(states, state, inside)
        y = tl.sum(state * q[:, None], 0)
        if BLOCK >= VALUES:
            z = tl.load(row_ptr + row * row_stride + channels + head * VALUES + value, value < VALUES, 0.0).to(
                tl.float32
            )
            y = y * tl.rsqrt(tl.sum(y * y) / VALUES + eps) * weight * z * tl.sigmoid(z)
        tl.store(out, y.to(out_ptr.dtype.element_ty), value < VALUES)


# The slots of prefill rows follow those of decode rows: aligned or not.
@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["slots_ptr"])
def _conv_prefill_kernel(
    x_ptr, weight_ptr, state_ptr, slots_ptr, starts_ptr, first_ptr, sequences_ptr, out_ptr, rows, x_stride, out_stride,
    slot_stride, CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows)[:, None] & (channel < CHANNELS)
    sequence = tl.load(sequences_ptr + row, row < rows, 0)
    begin = tl.load(starts_ptr + sequence)
    known = (tl.load(first_ptr + sequence) > 0)[:, None]
    state = state_ptr + (tl.load(slots_ptr + sequence).to(tl.int64) * slot_stride)[:, None] + channel
    y = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(KERNEL):
        at = (row - begin - (KERNEL - 1) + tap)[:, None]  # among the rows of the sequence; negative: before them
        x = x_ptr + (begin[:, None] + at).to(tl.int64) * x_stride + channel
        own = tl.load(x, inside & (at >= 0), 0.0).to(tl.float32)
        old = tl.load(state + (KERNEL - 1 + at) * CHANNELS, inside & (at < 0) & known, 0.0)
        y += (own + old) * tl.load(weight_ptr + tap * CHANNELS + channel, channel < CHANNELS, 0.0)
    out = out_ptr + row.to(tl.int64)[:, None] * out_stride + channel
    tl.store(out, (y * tl.sigmoid(y)).to(out_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _conv_state_kernel(
    x_ptr, state_ptr, slots_ptr, starts_ptr, first_ptr, snapshot_rows_ptr, snapshot_slots_ptr, x_stride, slot_stride,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Save the last inputs of each sequence: after its rows, and after those of its snapshot."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    tap = tl.arange(0, TAPS)[:, None]
    mask = (channel < CHANNELS) & (tap < KERNEL - 1)
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    known = tl.load(first_ptr + sequence) > 0
    saved = tl.load(snapshot_rows_ptr + sequence)
    state = state_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * slot_stride
    target = state_ptr + tl.load(snapshot_slots_ptr + sequence).to(tl.int64) * slot_stride
    at = end - begin - (KERNEL - 1) + tap
    x = tl.load(x_ptr + (begin + at).to(tl.int64) * x_stride + channel, mask & (at >= 0), 0.0).to(tl.float32)
    x += tl.load(state + (KERNEL - 1 + at) * CHANNELS + channel, mask & (at < 0) & known, 0.0)
    at = saved - (KERNEL - 1) + tap
    y = tl.load(x_ptr + (begin + at).to(tl.int64) * x_stride + channel, mask & (at >= 0), 0.0).to(tl.float32)
    y += tl.load(state + (KERNEL - 1 + at) * CHANNELS + channel, mask & (at < 0) & known, 0.0)
    tl.debug_barrier()  # all inputs were read before one is overwritten
    tl.store(state + tap * CHANNELS + channel, x, mask)
    tl.store(target + tap * CHANNELS + channel, y, mask & (saved > 0))


@triton.jit
def _chunk_rows(chunk, sequence, starts_ptr, first_ptr, chunk_starts_ptr, SIZE: tl.constexpr):
    """Return the first row of a chunk and the number of its rows. Chunks start at multiples of SIZE positions."""
    begin, end = tl.load(starts_ptr + sequence), tl.load(starts_ptr + sequence + 1)
    index = chunk - tl.load(chunk_starts_ptr + sequence)
    offset = tl.load(first_ptr + sequence) % SIZE
    low = tl.maximum(begin, begin + index * SIZE - offset)
    high = tl.minimum(end, begin + (index + 1) * SIZE - offset)
    return low, high - low


@triton.jit
def _load_heads(mixed_ptr, row, mask, mixed_stride, head_at, KEYS: tl.constexpr, PADDED_KEYS: tl.constexpr,
                L2: tl.constexpr, DIVISOR: tl.constexpr):  # fmt: skip
    """Return heads, `[rows, keys]`, whose squared length is 1 / DIVISOR."""
    key = tl.arange(0, PADDED_KEYS)[None, :]
    at = mixed_ptr + row.to(tl.int64)[:, None] * mixed_stride + head_at + key
    x = tl.load(at, mask[:, None] & (key < KEYS), 0.0).to(tl.float32)
    return x * tl.rsqrt((tl.sum(x * x, 1) + L2) * DIVISOR)[:, None]


@triton.jit
def _inverse_kernel(
    mixed_ptr, gate_ptr, rate_ptr, dt_bias_ptr, starts_ptr, first_ptr, chunk_starts_ptr, sequences_ptr, inverse_ptr,
    decays_ptr, betas_ptr, mixed_stride, gate_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, L2: tl.constexpr,
    PADDED_KEYS: tl.constexpr, SIZE: tl.constexpr, SUB: tl.constexpr, PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Invert the triangular system of a chunk and head; also store its summed decays, and beta.

    The system is 1 − D − O with the blocks D of SUB rows on the diagonal, and O below them. With T = (1 − D)⁻¹ and
    N = T · O, its inverse is (1 − N)⁻¹ · T, where N⁴ = 0.
    """
    chunk, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences_ptr + chunk)
    low, count = _chunk_rows(chunk, sequence, starts_ptr, first_ptr, chunk_starts_ptr, SIZE)
    i = tl.arange(0, SIZE)
    mask = i < count
    row = low + i
    gates = gate_ptr + row.to(tl.int64) * gate_stride
    decay, beta = _gates(gates, dt_bias_ptr, rate_ptr, head, mask, HEADS)
    total = tl.cumsum(tl.where(mask, decay, 0.0), 0)
    beta = tl.where(mask, beta, 0.0)
    tl.store(decays_ptr + row.to(tl.int64) * HEADS + head, total, mask)
    tl.store(betas_ptr + row.to(tl.int64) * HEADS + head, beta, mask)
    key_head = head // (HEADS // KEY_HEADS)
    k = _load_heads(mixed_ptr, row, mask, mixed_stride, (KEY_HEADS + key_head) * KEYS, KEYS, PADDED_KEYS, L2, 1)
    below = i[:, None] > i[None, :]
    pairs = tl.exp(tl.where(below, total[:, None] - total[None, :], 0.0))
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    system = tl.where(below, -beta[:, None] * products * pairs, 0.0)
    tl.static_assert(SIZE == 4 * SUB)
    same = (i[:, None] // SUB) == (i[None, :] // SUB)
    inverse = tl.where(same, system, 0.0)
    for n in range(1, SUB):  # forward substitution in all blocks at once: rows before n are those of the inverse
        here = same & ((i[:, None] % SUB) == n)
        line = tl.sum(tl.where(here, inverse, 0.0), 0)
        line += tl.sum(line[:, None] * inverse, 0)
        inverse = tl.where(here, line[None, :], inverse)
    inverse += tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    outer = tl.dot(inverse, tl.where(same, 0.0, system), input_precision=EXACT)
    square = tl.dot(outer, outer, input_precision=EXACT)
    inverse += tl.dot(square, inverse, input_precision=EXACT)
    inverse += tl.dot(outer, inverse, input_precision=EXACT)
    at = (chunk.to(tl.int64) * HEADS + head) * SIZE * SIZE
    tl.store(inverse_ptr + at + i[:, None] * SIZE + i[None, :], inverse)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _scan_kernel(
    mixed_ptr, inverse_ptr, decays_ptr, betas_ptr, state_ptr, slots_ptr, starts_ptr, first_ptr, chunk_starts_ptr,
    snapshot_rows_ptr, snapshot_slots_ptr, out_ptr, mixed_stride, out_stride, slot_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, L2: tl.constexpr,
    PADDED_KEYS: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the outputs of a sequence, for a head and BLOCK of its values, chunk by chunk."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    value = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    key, i = tl.arange(0, PADDED_KEYS), tl.arange(0, SIZE)
    inside = (key[:, None] < KEYS) & (value[None, :] < VALUES)
    at = head * KEYS * VALUES + key[:, None] * VALUES + value[None, :]
    states = state_ptr + tl.load(slots_ptr + sequence).to(tl.int64) * slot_stride + at
    targets = state_ptr + tl.load(snapshot_slots_ptr + sequence).to(tl.int64) * slot_stride + at
    known = tl.load(first_ptr + sequence) > 0
    state = tl.load(states, inside & known, 0.0)
    saved = tl.load(starts_ptr + sequence) + tl.load(snapshot_rows_ptr + sequence)
    is_saved = tl.load(snapshot_rows_ptr + sequence) > 0
    key_head = head // (HEADS // KEY_HEADS)
    for chunk in range(tl.load(chunk_starts_ptr + sequence), tl.load(chunk_starts_ptr + sequence + 1)):
        low, count = _chunk_rows(chunk, sequence, starts_ptr, first_ptr, chunk_starts_ptr, SIZE)
        mask = i < count
        row = low + i
        wide = row.to(tl.int64)
        q = _load_heads(mixed_ptr, row, mask, mixed_stride, key_head * KEYS, KEYS, PADDED_KEYS, L2, KEYS)
        k = _load_heads(mixed_ptr, row, mask, mixed_stride, (KEY_HEADS + key_head) * KEYS, KEYS, PADDED_KEYS, L2, 1)
        values = mixed_ptr + wide[:, None] * mixed_stride + 2 * KEY_HEADS * KEYS + head * VALUES + value[None, :]
        valid = mask[:, None] & (value[None, :] < VALUES)
        v = tl.load(values, valid, 0.0).to(tl.float32)
        total = tl.load(decays_ptr + wide * HEADS + head, mask, 0.0)
        last = tl.sum(tl.where(i == count - 1, total, 0.0))
        total = tl.where(mask, total, last)  # so that no exponent below is positive
        beta = tl.load(betas_ptr + wide * HEADS + head, mask, 0.0)
        inverse = inverse_ptr + (chunk * HEADS + head).to(tl.int64) * SIZE * SIZE
        inverse = tl.load(inverse + i[:, None] * SIZE + i[None, :])
        grown = tl.exp(total)[:, None]
        right = beta[:, None] * (v - grown * tl.dot(k, state, input_precision=PRECISION))
        update = tl.dot(inverse, right, input_precision=PRECISION)
        seen = i[:, None] >= i[None, :]
        pairs = tl.where(seen, tl.exp(tl.where(seen, total[:, None] - total[None, :], 0.0)), 0.0)
        weights = tl.dot(q, tl.trans(k), input_precision=PRECISION) * pairs
        y = grown * tl.dot(q, state, input_precision=PRECISION)
        y += tl.dot(weights, update, input_precision=PRECISION)
        out = out_ptr + wide[:, None] * out_stride + head * VALUES + value[None, :]
        tl.store(out, y.to(out_ptr.dtype.element_ty), valid)
        kept = k * tl.exp(last - total)[:, None]
        state = state * tl.exp(last) + tl.dot(tl.trans(kept), update, input_precision=PRECISION)
        tl.store(targets, state, inside & is_saved & (low + count == saved))
    tl.store(states, state, inside)


@triton.jit
def _gated_norm_kernel(
    x_ptr, gate_ptr, weight_ptr, x_stride, gate_stride, eps, HEADS: tl.constexpr, VALUES: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Normalize GROUP heads of a row in place, and multiply them by silu(gate)."""
    row = tl.program_id(0).to(tl.int64)
    head, value = (tl.program_id(1) * GROUP + tl.arange(0, GROUP))[:, None], tl.arange(0, BLOCK)[None, :]
    mask = (head < HEADS) & (value < VALUES)
    at = head * VALUES + value
    x = tl.load(x_ptr + row * x_stride + at, mask, 0.0).to(tl.float32)
    z = tl.load(gate_ptr + row * gate_stride + at, mask, 0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / VALUES + eps)[:, None] * tl.load(weight_ptr + value, value < VALUES, 0.0)
    tl.store(x_ptr + row * x_stride + at, (x * scale * z * tl.sigmoid(z)).to(x_ptr.dtype.element_ty), mask)


def delta_net_decode(
    projected: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaNetParameters,
    shape: DeltaNetShape,
    eps: float,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
    out: torch.Tensor,
    *,
    pdl: bool = False,
) -> torch.Tensor:
    """Compute one token per row, and update the states in `slots`. A row of length 0 is padding and yields zeros.

    `projected`: rows that begin with `[q | k | v | z]`; `gates`: rows `[b | a]`.
    `lengths`: tokens of each sequence, the new one included; a sequence of one token has no state yet.
    """
    rows, channels = len(lengths), shape.channels
    mixed = projected.new_empty(rows, channels)
    _conv_decode_kernel[(rows, triton.cdiv(channels, CONV_BLOCK))](
        projected, weights.conv, conv_states, slots, lengths, mixed, projected.stride(0), mixed.stride(0),
        conv_states.stride(0), CHANNELS=channels, KERNEL=shape.kernel, TAPS=triton.next_power_of_2(shape.kernel),
        BLOCK=CONV_BLOCK, num_warps=4, **pdl_options(pdl),
    )  # fmt: skip
    padded = triton.next_power_of_2(shape.value_size)
    block = min(padded, DECODE_BLOCK) if rows * shape.value_heads >= MANY_HEADS else padded
    _delta_decode_kernel[(rows, shape.value_heads, triton.cdiv(shape.value_size, block))](
        mixed, projected, gates, recurrent_states, weights.rate, weights.dt_bias, weights.norm, slots, lengths, out,
        mixed.stride(0), projected.stride(0), gates.stride(0), out.stride(0), recurrent_states.stride(0), eps,
        KEY_HEADS=shape.key_heads, HEADS=shape.value_heads, KEYS=shape.key_size, VALUES=shape.value_size, L2=L2_EPS,
        PADDED_KEYS=triton.next_power_of_2(shape.key_size), BLOCK=block,
        num_warps=DECODE_WARPS if block < padded else 8, **pdl_options(pdl),
    )  # fmt: skip
    if block < shape.value_size:
        _normalize(out, projected[:, channels:], weights, shape, eps)
    return out


def delta_net_prefill(
    projected: torch.Tensor,
    gates: torch.Tensor,
    weights: DeltaNetParameters,
    shape: DeltaNetShape,
    eps: float,
    slots: torch.Tensor,
    starts: torch.Tensor,
    first: torch.Tensor,
    prefill: PrefillStates,
    conv_states: torch.Tensor,
    recurrent_states: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """Compute the rows of several sequences, and update their states and the snapshots.

    `projected`: rows that begin with `[q | k | v | z]`; `gates`: rows `[b | a]`.
    `starts`: first row of each sequence and the end of the last; `first`: position of each sequence's first row.
    """
    rows, channels, heads = len(projected), shape.channels, shape.value_heads
    sequences, chunks = len(slots), len(prefill.chunk_sequences)
    taps, blocks = triton.next_power_of_2(shape.kernel), triton.cdiv(channels, CONV_BLOCK)
    mixed = projected.new_empty(rows, channels)
    _conv_prefill_kernel[(triton.cdiv(rows, CONV_ROWS), blocks)](
        projected, weights.conv, conv_states, slots, starts, first, prefill.row_sequences, mixed, rows,
        projected.stride(0), mixed.stride(0), conv_states.stride(0),
        CHANNELS=channels, KERNEL=shape.kernel, BLOCK=CONV_BLOCK, ROWS=CONV_ROWS, num_warps=4,
    )  # fmt: skip
    _conv_state_kernel[(sequences, blocks)](
        projected, conv_states, slots, starts, first, prefill.snapshot_rows, prefill.snapshot_slots,
        projected.stride(0), conv_states.stride(0),
        CHANNELS=channels, KERNEL=shape.kernel, TAPS=taps, BLOCK=CONV_BLOCK, num_warps=4,
    )  # fmt: skip
    inverse = torch.empty(chunks, heads, CHUNK, CHUNK, dtype=torch.float32, device=projected.device)
    decays, betas = torch.empty(2, rows, heads, dtype=torch.float32, device=projected.device)
    precision = "ieee" if projected.dtype == torch.float32 else "tf32"
    padded_keys = max(16, triton.next_power_of_2(shape.key_size))
    _inverse_kernel[(chunks, heads)](
        mixed, gates, weights.rate, weights.dt_bias, starts, first, prefill.chunk_starts,
        prefill.chunk_sequences, inverse, decays, betas, mixed.stride(0), gates.stride(0),
        KEY_HEADS=shape.key_heads, HEADS=heads, KEYS=shape.key_size, L2=L2_EPS,
        PADDED_KEYS=padded_keys, SIZE=CHUNK, SUB=SUB_CHUNK, PRECISION=precision,
        EXACT="ieee" if precision == "ieee" else "tf32x3", num_warps=4,
    )  # fmt: skip
    is_small = 0 < shared_memory() < SCAN_SHARED_MEMORY
    most = VALUE_BLOCK if sequences * heads > FEW_HEADS and not is_small else FEW_VALUE_BLOCK
    options = {"num_stages": 1} if is_small else {}
    block = max(16, min(most, triton.next_power_of_2(shape.value_size)))
    _scan_kernel[(sequences, heads, triton.cdiv(shape.value_size, block))](
        mixed, inverse, decays, betas, recurrent_states, slots, starts, first, prefill.chunk_starts,
        prefill.snapshot_rows, prefill.snapshot_slots, out,
        mixed.stride(0), out.stride(0), recurrent_states.stride(0),
        KEY_HEADS=shape.key_heads, HEADS=heads, KEYS=shape.key_size, VALUES=shape.value_size, L2=L2_EPS,
        PADDED_KEYS=padded_keys, BLOCK=block, SIZE=CHUNK, PRECISION=precision, num_warps=4, **options,
    )  # fmt: skip
    _normalize(out, projected[:, channels:], weights, shape, eps)
    return out


def _normalize(
    out: torch.Tensor, gate: torch.Tensor, weights: DeltaNetParameters, shape: DeltaNetShape, eps: float
) -> None:
    """Normalize each head of `out` in place, and multiply it by the gate."""
    group = min(NORM_HEADS, triton.next_power_of_2(shape.value_heads))
    _gated_norm_kernel[(len(out), triton.cdiv(shape.value_heads, group))](
        out, gate, weights.norm, out.stride(0), gate.stride(0), eps, HEADS=shape.value_heads, VALUES=shape.value_size,
        BLOCK=triton.next_power_of_2(shape.value_size), GROUP=group, num_warps=4,
    )  # fmt: skip
