"""The log-probabilities of a prompt's own tokens, collected as the prompt is computed."""

from __future__ import annotations

import torch

from syringa.engine.sampling.sampler import prompt_logprobs
from syringa.engine.scheduling.scheduler_output import Scheduled


def score_prompt(item: Scheduled, logits: torch.Tensor, *, vocabulary: int) -> None:
    """Row i of the item predicts the prompt's token start + i + 1. What was scored before is not scored twice."""
    sequence = item.sequence
    scores, top = sequence.prompt_scores, sequence.request.prompt_logprobs
    assert scores is not None
    assert top is not None
    targets = sequence.request.prompt[item.start + 1 : item.start + 1 + len(logits)]
    found = prompt_logprobs(logits[: len(targets), :vocabulary], targets, top)
    scores += found[len(scores) - item.start - 1 :]
