"""Ids of calls as a family's template wants them. Clients send back ours, or those of another server."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

from syringa.output_formats import ToolCallFormat
from syringa.prompt.chat.template import Message

_NINE = re.compile("[a-zA-Z0-9]{9}")


def with_ids_of(format: ToolCallFormat, messages: Sequence[Message]) -> list[Message]:
    """The messages with ids that the family knows: Mistral's templates refuse others, Kimi writes what it reads."""
    if format not in ("mistral", "mistral-args", "kimi"):
        return list(messages)
    renamed: dict[str, str] = {}
    result = []
    calls = 0
    for message in messages:
        if message.get("tool_calls"):
            changed = []
            for call in message["tool_calls"]:
                name = call["function"]["name"]
                renamed[call["id"]] = f"functions.{name}:{calls}" if format == "kimi" else _nine(call["id"])
                changed.append({**call, "id": renamed[call["id"]]})
                calls += 1
            message = {**message, "tool_calls": changed}
        elif "tool_call_id" in message:
            message = {**message, "tool_call_id": renamed.get(message["tool_call_id"], message["tool_call_id"])}
        result.append(message)
    return result


def _nine(id: str) -> str:
    return id if _NINE.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]
