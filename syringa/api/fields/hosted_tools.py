"""Tools of OpenAI that this server does not have: those that run there, and clients' tools in formats of its models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from syringa.errors import InvalidRequest

UnsupportedTools = Literal["ignore", "refuse"]
"""The setting `unsupported_tools`."""

HOSTED_TOOLS: Mapping[str, dict[str, Any]] = {
    "web_search": {},
    "web_search_2025_08_26": {},
    "web_search_preview": {},
    "web_search_preview_2025_03_11": {},
    "file_search": {"vector_store_ids": []},
    "code_interpreter": {"container": {"type": "auto"}},
    "image_generation": {},
    "computer": {},
    "computer_use": {},
    "computer_use_preview": {"environment": "browser", "display_width": 0, "display_height": 0},
    "local_shell": {},
    "shell": {},
    "apply_patch": {},
    "programmatic_tool_calling": {},
}
"""Types of hosted tools, with values of the fields that OpenAI's schema requires."""

NAMES = ", ".join(f"`{each}`" for each in HOSTED_TOOLS if "_20" not in each)


def report_hosted_tool(kind: str, path: str, unsupported: UnsupportedTools, ignored: list[str]) -> None:
    """Append a hosted tool to `ignored`. Raises `InvalidRequest` if the server refuses such tools."""
    if unsupported == "refuse":
        raise InvalidRequest(
            f"{path}.type: this server has no {kind} tool, and refuses tools that it does not have.",
            param=f"{path}.type",
        )
    ignored.append(f"{path} ({kind})")


def hosted_tool_echo(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hosted tool as a response repeats it, in a form that OpenAI's schema allows."""
    kind = given["type"]
    sent = {name: value for name, value in given.items() if value is not None}
    return HOSTED_TOOLS[kind] | sent | {"type": "computer" if kind == "computer_use" else kind}


def missing_tool(hosted: bool) -> InvalidRequest:
    """Return the error for a `tool_choice` that requires a call where no tool is left; `hosted`: some were ignored."""
    left = "this server has none of the tools" if hosted else "there are no tools"
    return InvalidRequest(f"tool_choice requires a tool, but {left}.", param="tool_choice")
