"""Blocks of messages that offer another tool to the model from there on, or withdraw one."""

from __future__ import annotations

from typing import Any

import msgspec

from syringa.api.decoding import convert
from syringa.errors import InvalidRequest

TOOL_CHANGES = ("tool_addition", "tool_removal")
TOOL_REFERENCES = ("tool_reference", "mcp_tool_reference", "mcp_toolset_reference")


class ToolChangeField(msgspec.Struct, kw_only=True):
    type: str
    tool: Any = None
    cache_control: Any = None


class ChangedToolField(msgspec.Struct, kw_only=True):
    """The tool of a change: the name of one, or the definition of another. Those of MCP servers have other fields."""

    type: str
    name: str | None = None
    server_name: str | None = None
    definition: dict[str, Any] | None = None


class ToolChange(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that is offered or withdrawn, by name, or by a definition as in the field `tools`."""

    path: str  # of the block
    type: str  # of the block
    tool: str | dict[str, Any]


def read_tool_change(kind: str, given: Any, path: str, ignored: list[str]) -> ToolChange | None:
    """Validate a block of a type of `TOOL_CHANGES`. Returns None for tools of MCP servers: they are named as ignored.

    Raises `InvalidRequest`.
    """
    block = convert(given, ToolChangeField, path=path, ignored=ignored)
    tool = convert(block.tool, ChangedToolField, path=f"{path}.tool", ignored=ignored)
    if tool.type == "tool_definition" and kind == "tool_addition":
        if tool.definition is None:
            raise InvalidRequest(f"{path}.tool.definition: required.", param=f"{path}.tool.definition")
        return ToolChange(path=path, type=kind, tool=tool.definition)
    if tool.type not in TOOL_REFERENCES:
        expected = ", ".join((*TOOL_REFERENCES, *(("tool_definition",) if kind == "tool_addition" else ())))
        raise InvalidRequest(f"{path}.tool.type: expected one of {expected}.", param=f"{path}.tool.type")
    if tool.type == "tool_reference" and tool.name is not None:
        return ToolChange(path=path, type=kind, tool=tool.name)
    ignored.append(f"{path} ({kind})")
    return None
