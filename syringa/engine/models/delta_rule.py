"""The gated delta rule and its convolution in PyTorch: the fallback without compiled kernels, and their reference.

A head keeps a matrix S, `[key size, value size]`. A token with query q, key k, value v, decay e^g and rate β does

    S ← e^g · S;   S ← S + k (β (v − Sᵀk))ᵀ;   output = Sᵀq

Several tokens are computed at once in chunks that start at multiples of `CHUNK` from the start of the sequence. With c
the sum of g within a chunk and S the state before it, the updates u of all its tokens solve a triangular system,

    u_i = β_i (v_i − e^{c_i} Sᵀk_i − Σ_{j<i} e^{c_i − c_j} (k_i · k_j) u_j)

and outputs and the next state follow from u by products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from syringa.engine.models.hybrid_config import DeltaNetShape
from syringa.engine.scheduling.state_cache import SNAPSHOT_MULTIPLE

CHUNK = SNAPSHOT_MULTIPLE  # tokens: so that a snapshot is the state between two chunks
L2_EPS = 1e-6  # added to the squared length of queries and keys


class DeltaNetParameters(NamedTuple):
    """What a gated delta net has beside its projections, in fp32 and contiguous."""

    conv: torch.Tensor  # [kernel, channels]
    rate: torch.Tensor  # [value heads]: −e^A
    dt_bias: torch.Tensor  # [value heads]
    norm: torch.Tensor  # [value size]


def read_delta_net_parameters(prefix: str, weight: Callable[[str], torch.Tensor]) -> DeltaNetParameters:
    """Read the parameters of the delta net whose tensors have this prefix."""
    return DeltaNetParameters(
        conv=weight(f"{prefix}conv1d.weight").float().squeeze(1).T.contiguous(),
        rate=-weight(f"{prefix}A_log").float().exp(),
        dt_bias=weight(f"{prefix}dt_bias").float().contiguous(),
        norm=weight(f"{prefix}norm.weight").float().contiguous(),
    )


def tiled_order(shape: DeltaNetShape) -> torch.Tensor:
    """Return the values of a token by heads: the first of each key head, then the second ones, and so on."""
    values = torch.arange(shape.value_width).view(shape.key_heads, -1, shape.value_size)
    return values.transpose(0, 1).flatten()


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule for the tokens of a sequence, in fp32. Queries are scaled."""

    q: torch.Tensor  # [tokens, heads, key size]
    k: torch.Tensor
    v: torch.Tensor  # [tokens, heads, value size]
    decay: torch.Tensor  # [tokens, heads]: g, not positive
    beta: torch.Tensor  # [tokens, heads]


def causal_conv(
    x: torch.Tensor, history: torch.Tensor | None, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return silu of the causal convolution of each channel, and all inputs with those before them.

    `x`: `[tokens, channels]`; `history`: the last inputs before them, `[kernel - 1, channels]`, None at the start of a
    sequence; `weight`: `[kernel, channels]`.
    """
    kernel = len(weight)
    if history is None:
        history = x.new_zeros(kernel - 1, x.shape[1])
    inputs = torch.cat([history, x])
    out = inputs[: len(x)] * weight[0]
    for i in range(1, kernel):
        out = out + inputs[i : i + len(x)] * weight[i]
    return F.silu(out), inputs


def make_inputs(
    mixed: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    rate: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
) -> DeltaInputs:
    """Split the convolved rows `[q | k | v]` into normalized heads, and compute decay and beta from `a` and `b`.

    `rate`: −e^A of each value head.
    """
    width = key_heads * key_size
    q, k, v = mixed.split([width, width, mixed.shape[1] - 2 * width], dim=1)
    heads = b.shape[1]
    q, k = (_normalize(each.unflatten(1, (key_heads, key_size))) for each in (q, k))
    q, k = (each.repeat_interleave(heads // key_heads, dim=1) for each in (q, k))
    decay = rate * F.softplus(a + dt_bias)
    return DeltaInputs(q * key_size**-0.5, k, v.unflatten(1, (heads, -1)), decay, b.sigmoid())


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


def recurrent_delta_rule(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute token by token. Return the outputs, `[tokens, heads, value size]`, and the state after them.

    `state`: `[heads, key size, value size]`, which is not modified.
    """
    outputs = []
    for q, k, v, decay, beta in zip(*inputs, strict=True):
        state = state * decay.exp()[:, None, None]
        update = (v - (state * k[:, :, None]).sum(1)) * beta[:, None]
        state = state + k[:, :, None] * update[:, None, :]
        outputs.append((state * q[:, :, None]).sum(1))
    return torch.stack(outputs), state


def chunk_delta_rule(inputs: DeltaInputs, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute up to `CHUNK` tokens at once, with the contract of `recurrent_delta_rule`."""
    q, k, v = (each.transpose(0, 1) for each in inputs[:3])  # [heads, tokens, size]
    beta, total = inputs.beta.T[..., None], inputs.decay.T.cumsum(1)  # [heads, tokens, 1], [heads, tokens]
    grown = total.exp()[..., None]
    pairs = (total[:, :, None] - total[:, None, :]).tril().exp().tril()  # decay from token j to token i
    system = (beta * (k @ k.transpose(1, 2)) * pairs).tril(-1)
    updates = torch.linalg.solve_triangular(system, beta * (v - grown * (k @ state)), upper=False, unitriangular=True)
    out = grown * (q @ state) + (q @ k.transpose(1, 2) * pairs) @ updates
    last = total[:, -1:]
    kept = (last - total).exp()[..., None]
    state = last.exp()[..., None] * state + (k * kept).transpose(1, 2) @ updates
    return out.transpose(0, 1), state


def delta_net_sequence(
    projected: torch.Tensor,
    parameters: DeltaNetParameters,
    shape: DeltaNetShape,
    eps: float,
    first: int,
    conv_state: torch.Tensor,
    state: torch.Tensor,
    snapshot: tuple[int, torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute the rows `[q | k | v | z | b | a]` of a sequence, `[tokens, value width]`, and update its states.

    `first`: the position of the first row; at the start of a sequence, the states are not read. `snapshot`: also write
    the states after so many rows, at a multiple of `CHUNK`, to these tensors. Computes in fp32.
    """
    heads, count = shape.value_heads, len(projected)
    mixed, z, b, a = projected.float().split([shape.channels, shape.value_width, heads, heads], dim=1)
    convolved, inputs = causal_conv(mixed, conv_state if first else None, parameters.conv)
    split = make_inputs(convolved, b, a, parameters.rate, parameters.dt_bias, shape.key_heads, shape.key_size)
    current = state if first else torch.zeros_like(state)
    outputs, at = [], 0
    while at < count:
        until = min(next_boundary(first + at) - first, count)
        part = DeltaInputs(*(each[at:until] for each in split))
        out, current = (recurrent_delta_rule if until - at == 1 else chunk_delta_rule)(part, current)
        outputs.append(out)
        at = until
        if snapshot is not None and at == snapshot[0]:
            snapshot[1].copy_(inputs[at : at + shape.kernel - 1])
            snapshot[2].copy_(current)
    state.copy_(current)
    conv_state.copy_(inputs[count:])
    return gated_norm(torch.cat(outputs), z.unflatten(1, (heads, -1)), parameters.norm, eps).flatten(1)


def next_boundary(position: int) -> int:
    """Return where the chunk that a position is in ends."""
    return (position // CHUNK + 1) * CHUNK


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of each head of `x`, `[tokens, heads, size]`, times silu(gate)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight * F.silu(gate)
