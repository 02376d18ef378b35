"""Limits of an engine's scheduler: step size, running sequences and queue. Torch-free."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Context length at which a prompt token costs about twice as much as one without context (measured on a CPU, in int8).
# Accounting for it keeps steps that streams wait for equally short at the beginning and the end of a long prompt.
ATTENTION_SPAN = 1536
GPU_ATTENTION_SPAN = 16384  # the same on a GPU, for an 8B model, by counting operations
# Prompt log-probabilities need a row of logits per token. These bound them per prompt and per step: 512 rows of
# 150,000 logits are 300 MB.
SCORING_CHUNK, SCORING_ROWS = 128, 512
# A prompt is charged to its tenant at the latest after this many full steps, see `VirtualTokenCounters`.
PROMPT_QUANTUM_STEPS = 4


@dataclass(frozen=True)
class SchedulerLimits:
    step_tokens: int = 512
    max_running: int = 256
    max_queue: int = 1024
    queue_seconds: float = 0.0  # a request that waits longer without having begun is refused; 0: no limit
    attention_span: int = ATTENTION_SPAN
    gpu_memory_fraction: float = 0.0  # fraction of GPU memory for weights and cache; 0: all that is free


class QueueFull(Exception):
    """The waiting queue has reached `max_queue`."""


class AdmissionMode(enum.Enum):
    """Which waiting sequences may still be admitted in a step."""

    OPEN = enum.auto()
    IDLE_TENANTS = enum.auto()  # only those of tenants with nothing running
    CLOSED = enum.auto()
