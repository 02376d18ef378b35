"""One vectorised pass from a batch's logits to its tokens. The order, of which each row takes what it asked for:

     1. logit bias
     2. repetition penalty, over prompt and output: positive logits are divided by it, negative ones multiplied
     3. frequency and presence penalties, over the output
     4. DRY
     5. grammar mask, and tokens that are banned for now
     6. temperature; 0 ends here with the best token
     7. top-k
     8. top-p, of what top-k left
     9. min-p
    10. the draw: one uniform number per row, keyed by (seed, choice, position); a row that favours a token takes it
        instead where it is the best of what the mask left

Log-probabilities are those of the model, before any of it.

A row's token and log-probabilities do not depend on the rest of the batch, to the bit: see `draw`. Host work comes
first and goes to the device in one piece; results come back in one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.sampling.draw import NO_TOKEN, by_row, draw_filtered, draw_greedy, draw_plain, top_logits, uniforms
from syringa.engine.sampling.rows import SamplerState, SamplingRow, collect_edits
from syringa.types import TokenLogprobs

__all__ = ["NO_TOKEN", "PendingTokens", "SampledTokens", "Sampler", "SamplerState", "SamplingRow", "prompt_logprobs"]

# JSON has no infinity. What OpenAI's API reports for tokens beyond its reach.
_LEAST_LOGPROB = -9999.0
# Alternatives are looked up this many at a time or a power of two, so that equals at the end of a row's list do not
# depend on how many its neighbours asked for.
_FEWEST_TOP = 32
# Rows that a CPU draws at a time: temporaries stay in its cache, and small enough for malloc to keep.
_CPU_ROWS = 16
# Prompt positions scored at a time: what bounds the memory of log-probabilities.
_SLICE = 64


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token for each row. `NO_TOKEN` (-1): nothing could be drawn, because masks left no token or logits were not
    finite; that choice cannot go on, the others are untouched."""

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


# For each byte of a mask: zero where the bit is set, and what no token survives where it is not.
_NEVER_OR_ZERO = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-np.inf),
)


class PendingTokens:
    """Draws under way on the device: `tokens` can feed the next step there, `read` waits and brings all to the host."""

    def __init__(self, tokens: torch.Tensor, packed: torch.Tensor, wanted: Sequence[_Wanted]) -> None:
        self.tokens = tokens
        self._packed = packed
        self._wanted = wanted

    def bring(self, home: Callable[[torch.Tensor], torch.Tensor]) -> PendingTokens:
        """The same with its numbers on their way to the host, so that `read` need not wait for what follows them."""
        return PendingTokens(self.tokens, home(self._packed), self._wanted)

    def read(self) -> SampledTokens:
        values = self._packed.cpu().numpy()
        count = len(self.tokens)
        tokens: list[int] = values[:count].astype(np.int64).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * count
        start = count
        for wanted in self._wanted:
            end = start + len(wanted.rows) * (1 + 2 * wanted.top)
            table = values[start:end].reshape(len(wanted.rows), -1)
            for row, k, line in zip(wanted.rows, wanted.counts, table, strict=True):
                if tokens[row] != NO_TOKEN:
                    logprobs[row] = _token_logprobs(tokens[row], line, wanted.top, k)
            start = end
        return SampledTokens(tokens, logprobs)


class Sampler:
    """Draws tokens for batches. `plain` and `greedy` may be replaced by faster functions with the same contract."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.greedy: Callable[[torch.Tensor], torch.Tensor] = draw_greedy
        self.plain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = draw_plain
        self._bits = torch.arange(32, dtype=torch.int32, device=self.device)
        self._never = torch.tensor(float("-inf"), device=self.device)
        self._scratch: torch.Tensor | None = None
        self._added = np.empty((4 * -(-vocab_size // 32), 8), dtype=np.float32)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], masks: torch.Tensor | None = None
    ) -> SampledTokens:
        """`launch` and `read` in one."""
        return self.launch(logits, rows, masks).read()

    def launch(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], masks: torch.Tensor | None = None
    ) -> PendingTokens:
        """Starts drawing. `logits` is float32 [rows, at least the vocabulary] and stays as it is; `masks`, on the host,
        is int32 [rows, ceil(vocabulary / 32)], a bit for each token that a row's grammar allows."""
        raw = logits[:, : self.vocab_size]
        edited = self._edited(raw, rows, masks)
        tokens = self._favour(edited, rows, self._draw(edited, rows))
        pieces = [tokens.double()]
        wanted = _wanted(rows)
        for group in wanted:
            pieces.append(_raw_logprobs(self._select(raw, group.rows), self._select(tokens, group.rows), group.top))
        return PendingTokens(tokens, torch.cat(pieces) if wanted else pieces[0], wanted)

    # Steps 1 to 5.
    def _edited(self, raw: torch.Tensor, rows: Sequence[SamplingRow], masks: torch.Tensor | None) -> torch.Tensor:
        constrained: list[int] = []
        if masks is not None:
            constrained = (masks != -1).any(-1).nonzero()[:, 0].tolist()
        edited = any(row.state.edits or row.banned for row in rows)
        if not constrained and not edited:
            return raw
        if masks is not None and not edited and len(constrained) == len(rows) and self.device.type == "cpu":
            masked = self._space(len(raw))
            self._mask(raw, masks, constrained, masked)
            return masked
        edits = collect_edits(rows, self.vocab_size)
        places = torch.from_numpy(edits.places).to(self.device, non_blocking=True)
        amounts = torch.from_numpy(edits.amounts).to(self.device, non_blocking=True)
        x = self._copy(raw)
        flat = x.view(-1)
        flat[places[edits.bias]] += amounts[edits.bias]
        at, factor = places[edits.repetition], amounts[edits.repetition]
        flat[at] = torch.where(flat[at] > 0, flat[at] / factor, flat[at] * factor)
        flat[places[edits.output]] -= amounts[edits.output]
        flat[places[edits.dry]] -= amounts[edits.dry]
        if masks is not None and constrained:
            self._mask(x, masks, constrained, x)
        flat[places[edits.banned]] = self._never
        return x

    def _copy(self, raw: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cpu":
            return raw.clone(memory_format=torch.contiguous_format)
        return self._space(len(raw)).copy_(raw)

    def _space(self, rows: int) -> torch.Tensor:
        """For a CPU, always the same memory: to be given megabytes anew takes longer than to fill them."""
        if self._scratch is None or len(self._scratch) < rows:
            self._scratch = torch.empty(rows, self.vocab_size)
        return self._scratch[:rows]

    def _mask(self, x: torch.Tensor, masks: torch.Tensor, constrained: list[int], out: torch.Tensor) -> None:
        """Makes what `masks` do not allow impossible, in the rows named. `out` may be `x`."""
        if self.device.type == "cpu":
            source, target, packed = x.numpy(), out.numpy(), masks.numpy().view(np.uint8)
            for row in constrained:
                # A byte of a mask is eight tokens' worth of what to add: many times faster than choosing one by one.
                np.take(_NEVER_OR_ZERO, packed[row], axis=0, out=self._added, mode="clip")
                np.add(source[row], self._added.reshape(-1)[: self.vocab_size], out=target[row])
            return
        chosen = masks[constrained].to(self.device, non_blocking=True)
        allowed = ((chosen[:, :, None] >> self._bits) & 1).bool().flatten(1)[:, : self.vocab_size]
        at = self._send(constrained)
        out[at] = torch.where(allowed, x[at], self._never)

    # Steps 6 to 10. Which group a row belongs to is its own affair, so its bits are too.
    def _draw(self, x: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        greedy = [i for i, row in enumerate(rows) if row.state.greedy]
        filtered = [i for i, row in enumerate(rows) if row.state.filtered]
        plain = [i for i, row in enumerate(rows) if not (row.state.greedy or row.state.filtered)]
        tokens = [self.greedy(self._select(x, greedy))] if greedy else []
        for part in self._parts(plain):
            temperature, uniform, *_ = self._parameters([rows[i] for i in part])
            tokens.append(self.plain(self._select(x, part), temperature.float(), uniform))
        for part in self._parts(filtered):
            temperature, uniform, *rules = self._parameters([rows[i] for i in part])
            tokens.append(draw_filtered(self._select(x, part), temperature.float(), uniform, *rules))
        if len(tokens) == 1:
            return tokens[0]
        result = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if tokens:
            result[self._send(greedy + plain + filtered)] = torch.cat(tokens)
        return result

    def _favour(self, x: torch.Tensor, rows: Sequence[SamplingRow], drawn: torch.Tensor) -> torch.Tensor:
        places = [i for i, row in enumerate(rows) if row.favoured is not None]
        if not places:
            return drawn
        favoured = self._send([favoured for row in rows if (favoured := row.favoured) is not None])
        at = self._send(places)
        best = self.greedy(self._select(x, places))
        result = drawn.clone()
        result[at] = torch.where(best == favoured, best, drawn[at])
        return result

    def _parts(self, rows: list[int]) -> list[list[int]]:
        size = _CPU_ROWS if self.device.type == "cpu" else max(len(rows), 1)
        return [rows[i : i + size] for i in range(0, len(rows), size)]

    def _parameters(self, rows: Sequence[SamplingRow]) -> torch.Tensor:
        settings = [row.state.sampling for row in rows]
        noise = uniforms([s.seed for s in settings], [row.choice for row in rows], [row.position for row in rows])
        table = [[s.temperature for s in settings], noise]
        table += [[s.top_k for s in settings], [s.top_p for s in settings], [s.min_p for s in settings]]
        return torch.from_numpy(np.array(table, dtype=np.float64)).to(self.device, non_blocking=True)

    def _select(self, x: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if rows[-1] - rows[0] == len(rows) - 1:  # ascending and without gaps: no copy
            return x[rows[0] : rows[-1] + 1]
        return x[self._send(rows)]

    def _send(self, numbers: list[int]) -> torch.Tensor:
        """By a copy that does not wait: `torch.tensor(…, device=…)` would, for all that the device has under way."""
        return torch.tensor(numbers).to(self.device, non_blocking=True)


def prompt_logprobs(logits: torch.Tensor, next_tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """The log-probability of each prompt token given those before it, and the `top` best in its place.

    Row i of `logits` (without padding columns) is what the model said before `next_tokens[i]`.
    """
    scored = []
    bucket = _bucket(top)
    for start in range(0, len(next_tokens), _SLICE):
        tokens = list(next_tokens[start : start + _SLICE])
        index = torch.tensor(tokens, device=logits.device)
        packed = _raw_logprobs(logits[start : start + len(tokens)].float(), index, bucket)
        table = packed.cpu().numpy().reshape(len(tokens), -1)
        scored += [_token_logprobs(token, line, bucket, top) for token, line in zip(tokens, table, strict=True)]
    return scored


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Rows whose log-probabilities are looked up together, `top` alternatives each; a row reports its count of them."""

    rows: list[int]
    counts: list[int]
    top: int


def _wanted(rows: Sequence[SamplingRow]) -> list[_Wanted]:
    groups: dict[int, _Wanted] = {}
    for i, row in enumerate(rows):
        if row.logprobs is not None:
            top = _bucket(row.logprobs)
            group = groups.setdefault(top, _Wanted([], [], top))
            group.rows.append(i)
            group.counts.append(row.logprobs)
    return list(groups.values())


def _bucket(top: int) -> int:
    return 0 if top == 0 else max(_FEWEST_TOP, 1 << (top - 1).bit_length())


def _raw_logprobs(logits: torch.Tensor, tokens: torch.Tensor, top: int) -> torch.Tensor:
    """A line for each row, flattened: the token's log-probability, then ids and log-probabilities of the best."""
    scores = by_row(torch.log_softmax, logits)
    lines = [scores.gather(-1, tokens.clamp(min=0)[:, None]).double()]
    if top:
        values, ids = top_logits(scores, top)
        # A vocabulary may have fewer tokens than the bucket: id -1 marks what is not there.
        lines += [F.pad(part.double(), (0, top - part.shape[-1]), value=-1.0) for part in (ids, values)]
    return torch.cat(lines, dim=-1).flatten()


def _token_logprobs(token: int, line: np.ndarray, top: int, k: int) -> TokenLogprobs:
    pairs = zip(line[1 : 1 + top].tolist(), line[1 + top :].tolist(), strict=True)
    # By value and then by id: how equals came out of a search must not show.
    best = sorted((-value, int(id_)) for id_, value in pairs if id_ >= 0)[:k]
    # The floor comes first in `max`, so that it also stands for what is no number.
    return TokenLogprobs(
        token, max(_LEAST_LOGPROB, float(line[0])), [(id_, max(_LEAST_LOGPROB, -value)) for value, id_ in best]
    )
