"""The `tools` and `tool_choice` fields."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence, Set
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.anthropic.content import read_cache_control
from syringa.api.anthropic.request import CacheControl
from syringa.api.anthropic.schemas import HOSTED_TYPE, MAX_TOOLS, TOOL_NAME
from syringa.api.anthropic.tool_changes import ToolChange
from syringa.api.decoding import convert
from syringa.api.fields.hosted_tools import UnsupportedTools, missing_tool, report_hosted_tool
from syringa.api.fields.tools import (
    FunctionField,
    ToolChoice,
    ToolRequest,
    build_tool_request,
    read_function,
)
from syringa.errors import InvalidRequest
from syringa.prompt.chat.tools import Tool

# Tools that run at Anthropic, and tools of clients in formats that its models are trained on.
_HOSTED_TYPE = re.compile(HOSTED_TYPE)
_SEARCH_TYPE = "tool_search_tool_"
_MODES: dict[str, Literal["none", "auto", "required"]] = {"auto": "auto", "any": "required", "none": "none"}


class CustomToolDefinition(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(pattern=TOOL_NAME)]
    input_schema: dict[str, Any]
    type: str = "custom"
    description: str | None = None
    strict: bool = False
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool = False
    allowed_callers: list[str] | None = None
    eager_input_streaming: bool | None = None
    cache_control: Any = None


class MessageToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class MessageTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a request that are offered to the model, and the last mark for the cache among all of them."""

    request: ToolRequest | None = None
    mark: CacheControl | None = None


async def read_message_tools(
    tools: list[Any] | None,
    choice: dict[str, Any] | None,
    ignored: list[str],
    *,
    referenced: Set[str],
    changes: Sequence[ToolChange] = (),
    constrain_arguments: bool,
    unsupported: UnsupportedTools,
) -> MessageTools:
    """Validate `tools` and `tool_choice`. Raises `InvalidRequest`.

    `referenced` are the names of deferred tools that a search has found. `changes` in messages apply in their order:
    the model is offered the tools that are left at the end. `constrain_arguments` enforces schemas as far as possible
    even without `strict`, for models that were not trained to call tools.
    """
    chosen = None if choice is None else convert(choice, MessageToolChoice, path="tool_choice", ignored=ignored)
    if chosen is not None and chosen.name is not None and chosen.type != "tool":
        ignored.append("tool_choice.name")
    if not tools and not changes:
        if chosen is not None and chosen.type in ("any", "tool"):
            raise missing_tool(hosted=False)
        return MessageTools()
    reader = _ToolReader(ignored, referenced, unsupported)
    try:
        return await asyncio.to_thread(reader.read, tools or [], changes, chosen, constrain_arguments)
    except RecursionError:
        raise InvalidRequest("tools: a schema is nested too deeply.", param="tools") from None


class _ToolReader:
    def __init__(self, ignored: list[str], referenced: Set[str], unsupported: UnsupportedTools) -> None:
        self._ignored, self._referenced, self._unsupported = ignored, referenced, unsupported
        self._mark: CacheControl | None = None
        self._found: dict[str, Tool] = {}
        self._hidden: set[str] = set()  # names of tools that are not offered
        self._can_search = True  # otherwise deferred tools would never be found

    def read(
        self,
        tools: list[Any],
        changes: Sequence[ToolChange],
        choice: MessageToolChoice | None,
        constrain_arguments: bool,
    ) -> MessageTools:
        deferred: set[str] = set()
        for index, given in enumerate(tools):
            path = f"tools[{index}]"
            definition = self._definition(given, path)
            if definition is None:
                continue
            if definition.name in self._found:
                path += ".name"
                raise InvalidRequest(f"{path}: duplicate tool name {definition.name!r}.", param=path)
            self._found[definition.name] = _to_tool(definition, path)
            if definition.defer_loading and definition.name not in self._referenced:
                deferred.add(definition.name)
        if self._can_search:
            self._hidden |= deferred
        for change in changes:
            self._change(change)
        offered = {name: tool for name, tool in self._found.items() if name not in self._hidden}
        request = build_tool_request(
            offered.values(),
            _read_choice(choice, offered),
            self._ignored,
            parallel=choice is None or not choice.disable_parallel_tool_use,
            constrain_arguments=constrain_arguments,
        )
        return MessageTools(request=request, mark=self._mark)

    def _change(self, change: ToolChange) -> None:
        name = change.tool
        if isinstance(name, dict):
            path = f"{change.path}.tool.definition"
            definition = self._definition(name, path)
            if definition is None:
                return
            name = definition.name
            self._found[name] = _to_tool(definition, path)
            if len(self._found) > MAX_TOOLS:
                raise InvalidRequest(f"{path}: at most {MAX_TOOLS} tools can be defined.", param=path)
        if name not in self._found:  # one that is not offered to the model in any case
            self._ignored.append(f"{change.path} ({change.type})")
        elif change.type == "tool_addition":
            self._hidden.discard(name)
        else:
            self._hidden.add(name)

    def _definition(self, given: dict[str, Any], path: str) -> CustomToolDefinition | None:
        """Return the definition of a tool. None: it is one of Anthropic's, which is named as ignored."""
        kind = given.get("type") or "custom"
        if isinstance(kind, str) and _HOSTED_TYPE.fullmatch(kind):
            report_hosted_tool(kind, path, self._unsupported, self._ignored)
            self._can_search = self._can_search and not kind.startswith(_SEARCH_TYPE)
            self._read_mark(given.get("cache_control"), path)
            return None
        definition = convert(given, CustomToolDefinition, path=path, ignored=self._ignored)
        if definition.type != "custom":
            raise InvalidRequest(
                f"{path}.type: expected custom or the type of a tool of Anthropic, not {definition.type!r}.",
                param=f"{path}.type",
            )
        if definition.allowed_callers is not None and "direct" not in definition.allowed_callers:
            self._ignored.append(f"{path}.allowed_callers")
        if definition.eager_input_streaming is False:
            self._ignored.append(f"{path}.eager_input_streaming")
        self._read_mark(definition.cache_control, path)
        return definition

    def _read_mark(self, given: Any, path: str) -> None:
        self._mark = read_cache_control(given, path, self._ignored) or self._mark


def _to_tool(definition: CustomToolDefinition, path: str) -> Tool:
    description = definition.description
    if definition.input_examples:
        examples = [f"Example input: {json.dumps(each, ensure_ascii=False)}" for each in definition.input_examples]
        description = "\n".join([*([description] if description else []), *examples])
    function = FunctionField(
        name=definition.name,
        description=description,
        parameters=definition.input_schema,
        strict=definition.strict,
    )
    return read_function(function, path, schema_field="input_schema")


def _read_choice(choice: MessageToolChoice | None, tools: dict[str, Tool]) -> ToolChoice:
    if choice is None:
        return ToolChoice("auto", frozenset(tools))
    if choice.type != "tool":
        return ToolChoice(_MODES[choice.type], frozenset(tools))
    if choice.name not in tools:
        known = ", ".join(tools) or "none"
        raise InvalidRequest(
            f"tool_choice.name: no tool {choice.name!r} is offered to the model ({known}).", param="tool_choice.name"
        )
    return ToolChoice("required", frozenset({choice.name}), named=True)
