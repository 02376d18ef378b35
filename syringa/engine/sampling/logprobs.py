"""Log-probabilities of sampled tokens and of prompts: the model's own, before any sampling rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from syringa.engine.sampling.draw import by_row, top_logits
from syringa.engine.sampling.sampler_input import SamplingRow
from syringa.types import TokenLogprobs

if TYPE_CHECKING:
    from syringa.engine.scheduling.scheduler_output import ScheduledSequence

# JSON has no infinity; OpenAI's API reports this for tokens of negligible probability.
_MIN_LOGPROB = -9999.0
# Alternatives are looked up in this number or a power of two, so that ties at the end of a row's list do not depend on
# how many its neighbors asked for.
_MIN_TOP = 32
# Prompt positions scored at a time, which bounds the memory of log-probabilities.
_SLICE = 64


def prompt_logprobs(logits: torch.Tensor, next_tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
    """Return the log-probability of each prompt token given those before it, and those of the `top` best tokens.

    Row i of `logits`, which has no padding columns, predicts `next_tokens[i]`.
    """
    scored = []
    bucket = _bucket(top)
    for start in range(0, len(next_tokens), _SLICE):
        tokens = list(next_tokens[start : start + _SLICE])
        index = torch.tensor(tokens, device=logits.device)
        rows = logits[start : start + len(tokens)].float()
        packed = torch.cat([pack_logprobs(rows, index, bucket), _ranks(rows, index)], dim=-1)
        for token, line in zip(tokens, packed.cpu().numpy(), strict=True):
            scores = unpack_logprobs(token, line[:-1], bucket, top)
            scored.append(TokenLogprobs(token, scores.logprob, scores.top, int(line[-1])))
    return scored


def _ranks(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the rank of a token in each row, 1 for the highest logit."""
    own = logits.gather(-1, tokens[:, None])
    return (logits > own).sum(-1, keepdim=True).double() + 1


def score_prompt(item: ScheduledSequence, logits: torch.Tensor, *, vocab_size: int) -> None:
    """Append the log-probabilities of a scheduled part of a prompt to its sequence.

    Row i of `logits` predicts the prompt's token `start + i + 1`. Tokens that were scored before a preemption are
    skipped.
    """
    sequence = item.sequence
    scores, top = sequence.prompt_scores, sequence.request.prompt_logprobs
    assert scores is not None
    assert top is not None
    targets = sequence.request.prompt[item.start + 1 : item.start + 1 + len(logits)]
    found = prompt_logprobs(logits[: len(targets), :vocab_size], targets, top)
    scores += found[len(scores) - item.start - 1 :]


@dataclass(frozen=True, slots=True)
class LogprobGroup:
    """Rows whose log-probabilities are looked up together, `top` alternatives each, of which a row reports `counts`.

    The alternatives are `tokens` if there are any, and otherwise the most likely ones.
    """

    rows: list[int]
    counts: list[int]
    top: int
    tokens: tuple[int, ...] = ()


def group_by_top(rows: Sequence[SamplingRow]) -> list[LogprobGroup]:
    """Group the rows that report log-probabilities by the alternatives to look up."""
    groups: dict[tuple[int, tuple[int, ...]], LogprobGroup] = {}
    for i, row in enumerate(rows):
        if row.logprobs is not None:
            tokens = row.logprob_tokens
            top = len(tokens) or _bucket(row.logprobs)
            group = groups.setdefault((top, tokens), LogprobGroup([], [], top, tokens))
            group.rows.append(i)
            group.counts.append(len(tokens) or row.logprobs)
    return list(groups.values())


def _bucket(top: int) -> int:
    return 0 if top == 0 else max(_MIN_TOP, 1 << (top - 1).bit_length())


def pack_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, top: int, alternatives: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a line per row: the token's log-probability, then the ids and log-probabilities of the `top` best.

    With `alternatives`, `top` token ids, these are reported instead of the best.
    """
    scores = by_row(torch.log_softmax, logits)
    lines = [scores.gather(-1, tokens.clamp(min=0)[:, None]).double()]
    if alternatives is not None:
        lines += [alternatives.double().expand(len(scores), -1), scores[:, alternatives].double()]
    elif top:
        values, ids = top_logits(scores, top)
        # A vocabulary may have fewer tokens than the bucket: id -1 marks a missing entry.
        lines += [F.pad(part.double(), (0, top - part.shape[-1]), value=-1.0) for part in (ids, values)]
    return torch.cat(lines, dim=-1)


def unpack_logprobs(token: int, line: np.ndarray, top: int, count: int) -> TokenLogprobs:
    """Read a line of `pack_logprobs` and keep the `count` best alternatives."""
    pairs = zip(line[1 : 1 + top].tolist(), line[1 + top :].tolist(), strict=True)
    # By value and then by id, so that the order of equals does not depend on the search.
    best = sorted((-value, int(id_)) for id_, value in pairs if id_ >= 0)[:count]
    # The floor comes first in `max`, so that it also replaces NaN.
    return TokenLogprobs(
        token, max(_MIN_LOGPROB, float(line[0])), [(id_, max(_MIN_LOGPROB, -value)) for value, id_ in best]
    )
