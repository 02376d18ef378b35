"""The input of a custom tool, which the model writes as the only parameter of a function call."""

from __future__ import annotations

import re
from typing import Any

PARAMETER = "input"
_OPENING = re.compile(rf'\s*\{{\s*"{PARAMETER}"\s*:\s*"')
# Text, or one escape. Surrogates are matched in pairs, or alone once it is certain that the other half does not follow.
_PIECE = re.compile(
    r"""[^"\\]+ | \\["\\/bfnrt]
    | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
    | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
    | \\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F]))""",
    re.VERBOSE,
)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def custom_tool_parameters(description: str | None = None, pattern: str | None = None) -> dict[str, Any]:
    """Return the schema of the function's arguments. The whole input has to match `pattern`."""
    text: dict[str, Any] = {"type": "string"}
    if description is not None:
        text["description"] = description
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    return {
        "type": "object",
        "properties": {PARAMETER: text},
        "required": [PARAMETER],
        "additionalProperties": False,
    }


class CustomInputParser:
    """Extracts the text from the JSON arguments as they arrive. Arguments of another shape are returned unchanged."""

    def __init__(self) -> None:
        self._buffer = ""  # not parsed yet
        self._inside = self._finished = False

    def feed(self, json_text: str) -> str:
        """Return the text that the next piece of JSON adds."""
        if self._finished:
            return ""
        self._buffer += json_text
        if not self._inside:
            opening = _OPENING.match(self._buffer)
            if opening is None:
                return ""
            self._inside, self._buffer = True, self._buffer[opening.end() :]
        out, at = [], 0
        while (found := _PIECE.match(self._buffer, at)) is not None:
            out.append(_decode_piece(found.group()))
            at = found.end()
        self._buffer = self._buffer[at:]
        self._finished = self._buffer.startswith('"')
        return "".join(out)

    def flush(self) -> str:
        """Return the remaining text at the end of the call."""
        left, self._buffer = self._buffer, ""
        return "" if self._inside else left


def _decode_piece(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if piece[1] != "u":
        return _ESCAPES.get(piece[1], piece[1])
    units = bytes.fromhex(piece.replace("\\u", ""))
    return units.decode("utf-16-be", "replace")
