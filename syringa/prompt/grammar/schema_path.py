"""Paths in a JSON schema, for error messages. The text is built only on demand: a schema has thousands of paths."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

_MAX_KEY_LENGTH = 64


class SchemaPath:
    """The path from the root of a schema to one of its parts."""

    __slots__ = ("_parent", "_step", "depth")

    def __init__(self, parent: SchemaPath | None = None, step: str = "") -> None:
        self._parent, self._step = parent, step
        self.depth: int = 0 if parent is None else parent.depth + 1

    def child(self, step: str) -> SchemaPath:
        return SchemaPath(self, step)

    def __str__(self) -> str:
        """Return the path as in `.properties.a.anyOf[1]`. Keys come from clients and are shortened."""
        steps: list[str] = []
        path: SchemaPath | None = self
        while path is not None:
            step = path._step
            steps.append(step if len(step) <= _MAX_KEY_LENGTH else step[:_MAX_KEY_LENGTH] + "…")
            path = path._parent
        return "".join(reversed(steps))


ROOT = SchemaPath()


def resolve_pointer(root: Any, reference: str) -> tuple[Any, SchemaPath]:
    """Return the target of a reference `#/…` and its path; None for a missing target, which llguidance rejects."""
    node, path = root, ROOT
    for written in reference[2:].split("/"):
        part = written.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            if part not in node:
                part = unquote(written).replace("~1", "/").replace("~0", "~")
            if part in node:
                node, path = node[part], path.child(f".{part}")
                continue
        elif isinstance(node, list) and part.isascii() and part.isdigit() and int(part[:9]) < len(node):
            node, path = node[int(part[:9])], path.child(f"[{part}]")
            continue
        return None, path
    return node, path
