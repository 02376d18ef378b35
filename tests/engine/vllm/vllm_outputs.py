"""Outputs like those of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def logprobs(**values: float) -> dict[int, Any]:
    """Return the log-probabilities of one position: `t5=-1.0` is that of token 5. Ranks follow the values."""
    order = sorted(values.values(), reverse=True)
    return {
        int(name[1:]): SimpleNamespace(logprob=value, rank=order.index(value) + 1) for name, value in values.items()
    }


def output(*tokens: int, finish: str | None = None, **fields: Any) -> Any:
    """Return a `RequestOutput` with tokens. `fields`: of it, and `logprobs` of its completion."""
    completion = SimpleNamespace(
        token_ids=list(tokens), logprobs=fields.pop("logprobs", None), finish_reason=finish, stop_reason=None
    )
    defaults = {"prompt_logprobs": None, "num_cached_tokens": 0, "metrics": None}
    return SimpleNamespace(outputs=[completion], **{**defaults, **fields})
