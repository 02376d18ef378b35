"""How the tools of a response are called: by the client, with a namespace, and by the model, with one name."""

from __future__ import annotations

import msgspec


class ToolKey(msgspec.Struct, frozen=True):
    """A tool as the client knows it. `kind` is its type: `function`, `custom`, `tool_search` or `mcp`.

    The namespace of a tool of an MCP server is the label of the server.
    """

    kind: str
    name: str
    namespace: str | None = None

    @property
    def prompt_name(self) -> str:
        return prompt_name(self.name, self.namespace)


def prompt_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool. Neither part contains a dot, so names cannot collide."""
    return name if namespace is None else f"{namespace}.{name}"
