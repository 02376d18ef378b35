"""Where the streams of OpenAI and of Open Responses differ: the names of some events, and the shape of an error."""

from __future__ import annotations

from typing import Any

import msgspec

from syringa.api.decoding import ErrorBody

THOUGHT, OPEN_THOUGHT = "reasoning_text", "reasoning"
_STATES = ("delta", "done")
_TO_OPEN = {f"response.{THOUGHT}.{state}": f"response.{OPEN_THOUGHT}.{state}" for state in _STATES}
_FROM_OPEN = {theirs: ours for ours, theirs in _TO_OPEN.items()}


def in_mode(name: str, open_mode: bool) -> str:
    """The name of an event, whichever mode it was written in."""
    return (_TO_OPEN if open_mode else _FROM_OPEN).get(name, name)


def error_event(error: ErrorBody, number: int, open_mode: bool) -> dict[str, Any]:
    """What tells a client that its stream cannot go on."""
    head = {"type": "error", "sequence_number": number}
    if open_mode:
        return head | {"error": msgspec.to_builtins(error)}
    return head | {"code": error.code, "message": error.message, "param": error.param}
