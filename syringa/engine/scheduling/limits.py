"""How much an engine does at a time, how much may wait, and who may be let in."""

from __future__ import annotations

import enum
from dataclasses import dataclass

# So many tokens before it make a prompt's token cost about twice as much (measured on a CPU, in int8). Counting that
# keeps a step that others wait for as short at the end of a long prompt as at its beginning.
ATTENTION_SPAN = 1536
GPU_ATTENTION_SPAN = 16384  # the same on a GPU, for an 8B model, by counting operations
# Scoring a prompt keeps a row of logits for each token: so many of one prompt, and of all in a step, are as much as
# memory should hold (512 rows of 150,000 numbers are 300 MB).
SCORING_CHUNK, SCORING_ROWS = 128, 512
# A prompt that has its turn keeps it for so many steps, if it is that long and other tenants ask too.
TURN_STEPS = 4


@dataclass(frozen=True)
class Limits:
    step_tokens: int = 512
    max_running: int = 256
    max_queue: int = 1024
    queue_seconds: float = 0.0  # a request that waits longer and was never begun is refused; 0: no limit
    attention_span: int = ATTENTION_SPAN
    gpu_memory_fraction: float = 0.0  # of the GPU's memory that weights and cache may take; 0: all that is free


class QueueFull(Exception):
    pass


class Entry(enum.Enum):
    """Who may be let in for the rest of a step."""

    OPEN = enum.auto()
    IDLE = enum.auto()  # tenants with nothing running: one that has something and wants more does not keep them out
    CLOSED = enum.auto()
