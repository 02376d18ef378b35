"""Giving up a step of background requests in the middle, for a request that has just arrived.

A step is faster per token the more tokens it has, and a request that arrives waits for its end. Where the model can
stop between layers, steps of background requests are therefore long, and are given up: nothing of such a step counts,
and its tokens are computed again later, to the same values. Without this, they have to be short (`ALONE_SECONDS` in
`scheduling/request_class.py`), which costs a batch some 8 % of its speed on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

IsInterrupted = Callable[[], bool]
"""Whether a request waits for which a step of background requests is given up. Called between layers."""


class StepInterrupted(Exception):
    """The forward pass was given up between two layers."""
