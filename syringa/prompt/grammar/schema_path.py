"""Where in a JSON schema something stands. A path is spelled only when somebody reads it: a schema has thousands."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

_LONGEST_KEY = 64


class SchemaPath:
    """The way from a schema's root to one of its parts."""

    __slots__ = ("_before", "_step", "depth")

    def __init__(self, before: SchemaPath | None = None, step: str = "") -> None:
        self._before, self._step = before, step
        self.depth: int = 0 if before is None else before.depth + 1

    def to(self, step: str) -> SchemaPath:
        return SchemaPath(self, step)

    def __str__(self) -> str:
        """As in `.properties.a.anyOf[1]`. Keys are the client's, and can be of any length."""
        steps: list[str] = []
        at: SchemaPath | None = self
        while at is not None:
            step = at._step
            steps.append(step if len(step) <= _LONGEST_KEY else step[:_LONGEST_KEY] + "…")
            at = at._before
        return "".join(reversed(steps))


ROOT = SchemaPath()


def resolve(root: Any, reference: str) -> tuple[Any, SchemaPath]:
    """What a JSON pointer behind `#/` points to, and where that is. What is not there is for llguidance to refuse."""
    node, trail = root, ROOT
    for written in reference[2:].split("/"):
        part = written.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            if part not in node:
                part = unquote(written).replace("~1", "/").replace("~0", "~")
            if part in node:
                node, trail = node[part], trail.to(f".{part}")
                continue
        elif isinstance(node, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(node):
            node, trail = node[int(part[:9])], trail.to(f"[{part}]")
            continue
        return None, trail
    return node, trail
