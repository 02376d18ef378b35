"""The input of a custom tool, which the model writes as the one parameter of a function."""

from __future__ import annotations

import re
from typing import Any

PARAMETER = "input"
_OPENING = re.compile(rf'\s*\{{\s*"{PARAMETER}"\s*:\s*"')
# Text, or one escape; halves of a character outside the first plane only together, or where it is plain that one is
# alone.
_PIECE = re.compile(
    r"""[^"\\]+ | \\["\\/bfnrt]
    | \\u(?![dD][89abAB])[0-9a-fA-F]{4}
    | \\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}
    | \\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F]))""",
    re.VERBOSE,
)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def parameters(about: str | None = None, pattern: str | None = None) -> dict[str, Any]:
    """The schema of that function's arguments. `about`: what the model is told of the input; `pattern`: what the whole
    of it has to match."""
    text: dict[str, Any] = {"type": "string"}
    if about is not None:
        text["description"] = about
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    return {
        "type": "object",
        "properties": {PARAMETER: text},
        "required": [PARAMETER],
        "additionalProperties": False,
    }


class CustomInput:
    """Reads the text out of the JSON as it arrives. What a model writes that is not of that shape is the input itself:
    better odd than lost."""

    def __init__(self) -> None:
        self._left = ""  # what was not understood yet
        self._inside = self._over = False

    def feed(self, json_text: str) -> str:
        """The text that the next piece of JSON adds."""
        if self._over:
            return ""
        self._left += json_text
        if not self._inside:
            opening = _OPENING.match(self._left)
            if opening is None:
                return ""
            self._inside, self._left = True, self._left[opening.end() :]
        out, at = [], 0
        while (found := _PIECE.match(self._left, at)) is not None:
            out.append(_decoded(found.group()))
            at = found.end()
        self._left = self._left[at:]
        self._over = self._left.startswith('"')
        return "".join(out)

    def flush(self) -> str:
        """What is left at the end of the call."""
        left, self._left = self._left, ""
        return "" if self._inside else left


def _decoded(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if piece[1] != "u":
        return _ESCAPES.get(piece[1], piece[1])
    units = bytes.fromhex(piece.replace("\\u", ""))
    return units.decode("utf-16-be", "replace")
