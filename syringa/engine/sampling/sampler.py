"""Sample a token for each row of a batch's logits, in one vectorized pass. The order, with only the rules that a row
asks for:

     1. logit bias
     2. repetition penalty, over prompt and output: positive logits are divided by it, negative ones multiplied
     3. frequency and presence penalties, over the output
     4. DRY
     5. token mask of the grammar and of the allowed tokens, bad words, and tokens that are banned at this position
     6. temperature; 0 ends here with the best token
     7. top-k
     8. top-p, of what top-k left
     9. min-p
    10. the draw: one uniform number per row, keyed by (seed, choice, position); a row with a preferred token takes it
        instead if it has the highest logit after step 5

Log-probabilities are the model's own, before step 1.

A row's token and log-probabilities are bit-equal whatever the rest of the batch is: see `draw`. The host's part is
copied to the device at once, and so are the results to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from syringa.engine.sampling.draw import draw_filtered, draw_greedy, draw_plain, uniforms
from syringa.engine.sampling.logprobs import LogprobGroup, group_by_top, pack_logprobs, unpack_logprobs
from syringa.engine.sampling.sampler_input import NO_TOKEN, SamplingRow, collect_edits
from syringa.types import TokenLogprobs

# Rows that a CPU samples at a time: temporaries stay in its cache, and small enough for malloc to reuse.
_CPU_ROWS = 16


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """A token and, where requested, its log-probabilities for each row.

    A token is `NO_TOKEN` (-1) if the mask left no token or the logits are not finite. That choice cannot go on; other
    rows are not affected.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]


# For each byte of a token mask, what to add to eight logits: 0 where the bit is set, -inf where it is not.
_MASK_BYTES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 1,
    np.float32(0),
    np.float32(-np.inf),
)


class PendingTokens:
    """Tokens being sampled on the device, where `tokens` can feed the next step. `read` waits for them."""

    def __init__(self, tokens: torch.Tensor, packed: torch.Tensor, groups: Sequence[LogprobGroup]) -> None:
        self.tokens = tokens
        self._packed = packed
        self._groups = groups

    def copy_to_host(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> PendingTokens:
        """Start copying the results with `copy`, so that `read` does not wait for what is started later."""
        return PendingTokens(self.tokens, copy(self._packed), self._groups)

    def read(self) -> SampledTokens:
        values = self._packed.cpu().numpy()
        count = len(self.tokens)
        tokens: list[int] = values[:count].astype(np.int64).tolist()
        logprobs: list[TokenLogprobs | None] = [None] * count
        start = count
        for group in self._groups:
            end = start + len(group.rows) * (1 + 2 * group.top)
            table = values[start:end].reshape(len(group.rows), -1)
            for row, count, line in zip(group.rows, group.counts, table, strict=True):
                if tokens[row] != NO_TOKEN:
                    logprobs[row] = unpack_logprobs(tokens[row], line, group.top, count)
            start = end
        return SampledTokens(tokens, logprobs)


class Sampler:
    """Sample tokens for batches. `plain` and `greedy` may be replaced by faster functions with the same contract."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self.greedy: Callable[[torch.Tensor], torch.Tensor] = draw_greedy
        self.plain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = draw_plain
        self._bits = torch.arange(32, dtype=torch.int32, device=self.device)
        self._minus_inf = torch.tensor(float("-inf"), device=self.device)
        self._scratch: torch.Tensor | None = None
        self._mask_row = np.empty((4 * -(-vocab_size // 32), 8), dtype=np.float32)

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], masks: torch.Tensor | None = None
    ) -> SampledTokens:
        """Sample and wait for the results: `launch` and `read`."""
        return self.launch(logits, rows, masks).read()

    def launch(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], masks: torch.Tensor | None = None
    ) -> PendingTokens:
        """Start sampling.

        `logits` is float32 [rows, at least the vocabulary] and is not modified. `masks`, on the host, is int32
        [rows, ceil(vocabulary / 32)], with a bit for each token that a row's grammar allows.
        """
        raw = logits[:, : self.vocab_size]
        edited = self.edit_logits(raw, rows, masks)
        tokens = self._apply_preferred(edited, rows, self._draw(edited, rows))
        pieces = [tokens.double()]
        groups = group_by_top(rows)
        for group in groups:
            ids = self._to_device(list(group.tokens)) if group.tokens else None
            scored, sampled = self._select(raw, group.rows), self._select(tokens, group.rows)
            pieces.append(pack_logprobs(scored, sampled, group.top, ids).flatten())
        return PendingTokens(tokens, torch.cat(pieces) if groups else pieces[0], groups)

    # Steps 1 to 5.
    def edit_logits(self, raw: torch.Tensor, rows: Sequence[SamplingRow], masks: torch.Tensor | None) -> torch.Tensor:
        if masks is None and not any(row.state.needs_host or row.banned for row in rows):
            return raw
        constrained: list[int] = []
        masks = self._with_allowed_tokens(rows, masks)
        if masks is not None:
            constrained = (masks != -1).any(-1).nonzero()[:, 0].tolist()
        edited = any(row.state.edits or row.banned for row in rows)
        if not constrained and not edited:
            return raw
        if masks is not None and not edited and len(constrained) == len(rows) and self.device.type == "cpu":
            masked = self._scratch_rows(len(raw))
            self._apply_masks(raw, masks, constrained, masked)
            return masked
        edits = collect_edits(rows, self.vocab_size)
        indices = torch.from_numpy(edits.indices).to(self.device, non_blocking=True)
        amounts = torch.from_numpy(edits.amounts).to(self.device, non_blocking=True)
        x = self._copy(raw)
        flat = x.view(-1)
        flat[indices[edits.bias]] += amounts[edits.bias]
        at, factor = indices[edits.repetition], amounts[edits.repetition]
        flat[at] = torch.where(flat[at] > 0, flat[at] / factor, flat[at] * factor)
        flat[indices[edits.output]] -= amounts[edits.output]
        flat[indices[edits.dry]] -= amounts[edits.dry]
        if masks is not None and constrained:
            self._apply_masks(x, masks, constrained, x)
        flat[indices[edits.banned]] = self._minus_inf
        return x

    def _with_allowed_tokens(self, rows: Sequence[SamplingRow], masks: torch.Tensor | None) -> torch.Tensor | None:
        """Return the grammars' masks without the tokens that the rows do not allow."""
        if not any(row.state.allowed is not None for row in rows):
            return masks
        if masks is None:
            masks = torch.full((len(rows), -(-self.vocab_size // 32)), -1, dtype=torch.int32)
        else:
            masks = masks.clone()
        for words, row in zip(masks.numpy(), rows, strict=True):
            if (allowed := row.state.allowed) is not None:
                words[: len(allowed)] &= allowed[: len(words)]
                words[len(allowed) :] = 0
        return masks

    def _copy(self, raw: torch.Tensor) -> torch.Tensor:
        if self.device.type != "cpu":
            return raw.clone(memory_format=torch.contiguous_format)
        return self._scratch_rows(len(raw)).copy_(raw)

    def _scratch_rows(self, rows: int) -> torch.Tensor:
        """Return the same CPU memory each time: allocating megabytes takes longer than filling them."""
        if self._scratch is None or len(self._scratch) < rows:
            self._scratch = torch.empty(rows, self.vocab_size)
        return self._scratch[:rows]

    def _apply_masks(self, x: torch.Tensor, masks: torch.Tensor, constrained: list[int], out: torch.Tensor) -> None:
        """Set the logits of masked tokens to -inf in the constrained rows. `out` may be `x`."""
        if self.device.type == "cpu":
            source, target, packed = x.numpy(), out.numpy(), masks.numpy().view(np.uint8)
            for row in constrained:
                # Looking up eight tokens per byte and adding is many times faster than selecting one by one.
                np.take(_MASK_BYTES, packed[row], axis=0, out=self._mask_row, mode="clip")
                np.add(source[row], self._mask_row.reshape(-1)[: self.vocab_size], out=target[row])
            return
        chosen = masks[constrained].to(self.device, non_blocking=True)
        allowed = ((chosen[:, :, None] >> self._bits) & 1).bool().flatten(1)[:, : self.vocab_size]
        at = self._to_device(constrained)
        out[at] = torch.where(allowed, x[at], self._minus_inf)

    # Steps 6 to 10. A row's group depends on the row alone, which keeps its bits independent of the batch.
    def _draw(self, x: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
        greedy = [i for i, row in enumerate(rows) if row.state.greedy]
        filtered = [i for i, row in enumerate(rows) if row.state.filtered]
        plain = [i for i, row in enumerate(rows) if not (row.state.greedy or row.state.filtered)]
        tokens = [self.greedy(self._select(x, greedy))] if greedy else []
        for part in self._split(plain):
            temperature, uniform, *_ = self._parameters([rows[i] for i in part])
            tokens.append(self.plain(self._select(x, part), temperature.float(), uniform))
        for part in self._split(filtered):
            temperature, uniform, *rules = self._parameters([rows[i] for i in part])
            tokens.append(draw_filtered(self._select(x, part), temperature.float(), uniform, *rules))
        if len(tokens) == 1:
            return tokens[0]
        result = torch.empty(len(rows), dtype=torch.int64, device=self.device)
        if tokens:
            result[self._to_device(greedy + plain + filtered)] = torch.cat(tokens)
        return result

    def _apply_preferred(self, x: torch.Tensor, rows: Sequence[SamplingRow], drawn: torch.Tensor) -> torch.Tensor:
        with_preference = [i for i, row in enumerate(rows) if row.preferred is not None]
        if not with_preference:
            return drawn
        preferred = self._to_device([preferred for row in rows if (preferred := row.preferred) is not None])
        at = self._to_device(with_preference)
        best = self.greedy(self._select(x, with_preference))
        result = drawn.clone()
        result[at] = torch.where(best == preferred, best, drawn[at])
        return result

    def _split(self, rows: list[int]) -> list[list[int]]:
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
        return x[self._to_device(rows)]

    def _to_device(self, numbers: list[int]) -> torch.Tensor:
        """Copy without waiting: `torch.tensor(…, device=…)` waits for all that the device has in flight."""
        return torch.tensor(numbers).to(self.device, non_blocking=True)
