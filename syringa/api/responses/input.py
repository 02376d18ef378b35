"""The `input` field: validation of its items, and their conversion to chat messages."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from syringa.api.chat.content import Content
from syringa.api.chat.messages import PromptMessage, read_arguments
from syringa.api.decoding import convert
from syringa.api.fields.hosted_tools import UnsupportedTools
from syringa.api.fields.tools import MAX_TOOLS
from syringa.api.responses.content_parts import ContentPartReader, read_text_parts
from syringa.api.responses.context import Item, ResponseContext, decrypt_reasoning, decrypt_summary
from syringa.api.responses.custom_input import PARAMETER
from syringa.api.responses.items import new_id
from syringa.api.responses.mcp.input import ApprovedCall, McpItemReader
from syringa.api.responses.message_builder import MessageBuilder
from syringa.api.responses.schemas import ITEM_TYPES, MAX_ID_LENGTH, NAME
from syringa.api.responses.tool_definitions import TOOL_SEARCH, ToolDefinition, ToolDefinitionReader
from syringa.api.responses.tool_names import prompt_name
from syringa.errors import InvalidRequest, NotFound
from syringa.remote_tools import RemoteTool

_INLINE_ITEMS = 200  # more take milliseconds, and are read in a thread
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
    "reasoning": "rs",
    "compaction": "cmp",
    "mcp_list_tools": "mcpl",
    "mcp_call": "mcp",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
}
_ITEMS_WITH_TOOLS = ("tool_search_output", "additional_tools", "mcp_list_tools")
_ROLES = ("user", "system", "developer", "assistant")
ItemStatus = Literal["in_progress", "completed", "incomplete"]
Namespace = Annotated[str, Meta(pattern=NAME)]
Execution = Literal["server", "client"]


class InputMessage(msgspec.Struct, kw_only=True):
    role: str
    content: Any = None
    type: str = "message"
    id: str | None = None
    status: ItemStatus = "completed"
    phase: Literal["commentary", "final_answer"] | None = None


class InputFunctionCall(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    name: str
    arguments: str
    namespace: Namespace | None = None
    id: str | None = None
    status: ItemStatus = "completed"


class InputCustomToolCall(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    name: str
    input: str
    namespace: Namespace | None = None
    id: str | None = None
    status: ItemStatus = "completed"


class InputToolOutput(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    output: Any = None
    id: str | None = None
    status: ItemStatus = "completed"


class InputToolSearchCall(msgspec.Struct, kw_only=True):
    type: str
    arguments: dict[str, Any]
    call_id: str | None = None
    execution: Execution = "client"
    id: str | None = None
    status: ItemStatus = "completed"


class InputToolSearchOutput(msgspec.Struct, kw_only=True):
    type: str
    tools: Annotated[list[Any], Meta(max_length=MAX_TOOLS)]
    call_id: str | None = None
    execution: Execution = "client"
    id: str | None = None
    status: ItemStatus = "completed"


class InputAdditionalTools(msgspec.Struct, kw_only=True):
    type: str
    tools: Annotated[list[Any], Meta(max_length=MAX_TOOLS)]
    role: Literal["developer"] = "developer"
    id: str | None = None


class InputReasoning(msgspec.Struct, kw_only=True):
    type: str
    summary: Any = None
    content: Any = None
    encrypted_content: str | None = None
    id: str | None = None
    status: ItemStatus = "completed"


class InputCompaction(msgspec.Struct, kw_only=True):
    type: str
    encrypted_content: str
    id: str | None = None
    created_by: str | None = None


class ParsedInput(msgspec.Struct):
    """The whole conversation as chat messages, the new items as they are stored, and the tools that items add.

    `mcp_lists` has the tools of MCP servers that were listed before, by `server_label`.
    """

    messages: list[PromptMessage]
    items: list[Item]
    added_tools: list[ToolDefinition]
    mcp_lists: dict[str, list[RemoteTool]]
    approved_calls: list[ApprovedCall]  # to be executed by this response


def _optional_namespace(namespace: str | None) -> dict[str, str]:
    return {} if namespace is None else {"namespace": namespace}


def item_type(given: Any) -> str | None:
    """Return the type of an item. It may be absent in a message, and in a reference, which has an id only."""
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    if kind is None:
        return "message" if "role" in given else "item_reference" if "id" in given else None
    return kind if isinstance(kind, str) else repr(kind)


async def read_input(
    given: Any,
    context: ResponseContext,
    *,
    supports_images: bool,
    ignored: list[str],
    history_field: str = "input",
    unsupported: UnsupportedTools = "ignore",
) -> ParsedInput:
    """Read the history and the new items. Raises `InvalidRequest` or `NotFound`.

    `history_field` is the request field that the history came from. `unsupported` is the setting `unsupported_tools`.
    """
    items = [*context.history, *(given if isinstance(given, list) else ())]
    if len(items) > _INLINE_ITEMS or any(item_type(each) in _ITEMS_WITH_TOOLS for each in items):
        return await asyncio.to_thread(_read, given, context, supports_images, ignored, history_field, unsupported)
    return _read(given, context, supports_images, ignored, history_field, unsupported)


def _read(
    given: Any,
    context: ResponseContext,
    supports_images: bool,
    ignored: list[str],
    history_field: str,
    unsupported: UnsupportedTools,
) -> ParsedInput:
    reader = _Reader(context, supports_images, ignored, unsupported)
    for item in context.history:
        reader.read(item, history_field, stored=True)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    elif given is not None and not isinstance(given, list):
        raise InvalidRequest("input: expected a string or an array of items.", param="input")
    items = [reader.read(each, f"input[{index}]") for index, each in enumerate(given or [])]
    _reject_duplicate_ids(items)
    messages = reader.builder.messages
    if not messages:
        raise InvalidRequest("input: expected a text or at least one item.", param="input")
    return ParsedInput(messages, items, reader.added_tools, reader.mcp.lists, reader.mcp.approved)


def _reject_duplicate_ids(items: list[Item]) -> None:
    seen = set()
    for index, item in enumerate(items):
        if item["id"] in seen:
            param = f"input[{index}].id"
            raise InvalidRequest(f"{param}: duplicate item id {item['id']!r}.", param=param)
        seen.add(item["id"])


class _Reader:
    """Reads items in order, and remembers those that later ones may answer or refer to."""

    def __init__(
        self, context: ResponseContext, supports_images: bool, ignored: list[str], unsupported: UnsupportedTools
    ) -> None:
        self.builder = MessageBuilder()
        self.added_tools: list[ToolDefinition] = []
        self.mcp = McpItemReader(self.builder, self._convert, self._stored_item)
        self._context, self._supports_images, self._ignored = context, supports_images, ignored
        self._unsupported = unsupported
        self._calls: dict[str, str] = {}  # tool name by call id
        self._items: dict[str, Item] = {}
        self._stored = False

    def read(self, given: Any, path: str, *, stored: bool = False) -> Item:
        """Add an item to the conversation. Returns it as it is stored.

        A `stored` item was validated before; a problem with one, such as a lost call, is not an error of this request.
        """
        self._stored = stored
        if not isinstance(given, dict):
            raise InvalidRequest(f"{path}: expected an object.", param=path)
        match item_type(given):
            case "message":
                item = self._message(given, path)
            case "function_call":
                item = self._function_call(given, path)
            case "custom_tool_call":
                item = self._custom_call(given, path)
            case "function_call_output" | "custom_tool_call_output":
                item = self._output(given, path)
            case "tool_search_call":
                item = self._search_call(given, path)
            case "tool_search_output":
                item = self._search_output(given, path)
            case "additional_tools":
                item = self._additional_tools(given, path)
            case "mcp_list_tools" | "mcp_call" | "mcp_approval_request" | "mcp_approval_response":
                item = self.mcp.read(given, path, stored=stored)
            case "reasoning":
                item = self._reasoning(given, path)
            case "compaction":
                item = self._compaction(given, path)
            case "item_reference":
                return self.read(self._referenced(given, path), path, stored=True)
            case kind:
                supported = ", ".join(ITEM_TYPES)
                raise InvalidRequest(f"{path}.type: supported items are {supported}, not {kind}.", param=f"{path}.type")
        self._items[item["id"]] = item
        return item

    def _convert(self, given: Item, wire: type[Any], path: str) -> Any:
        return convert(given, wire, path=path, ignored=None if self._stored else self._ignored)

    def _stored_item(self, field: Any, kind: str, path: str, **rest: Any) -> Item:
        """Return the item as it is stored: with its type, an id and a status."""
        id = new_id(_PREFIXES[kind]) if field.id is None else field.id
        if not 0 < len(id) <= MAX_ID_LENGTH or not id.isprintable():
            raise InvalidRequest(f"{path}.id: expected 1 to {MAX_ID_LENGTH} printable characters.", param=f"{path}.id")
        status = {"status": field.status} if hasattr(field, "status") else {}
        return {"type": kind, "id": id, **status, **rest}

    def _message(self, given: Item, path: str) -> Item:
        field: InputMessage = self._convert(given, InputMessage, path)
        if field.role not in _ROLES:
            raise InvalidRequest(
                f"{path}.role: expected {', '.join(_ROLES)}, not {field.role!r}.", param=f"{path}.role"
            )
        reader = ContentPartReader(field.role, supports_images=self._supports_images, ignored=self._ignored)
        content, kept = reader.read(field.content, f"{path}.content")
        if field.role == "assistant":
            self.builder.add_answer(content)
        else:
            self.builder.add_message(field.role, content, reader.images)
        if field.phase is not None and field.role != "assistant":
            raise InvalidRequest(f"{path}.phase: only assistant messages have a phase.", param=f"{path}.phase")
        phase = {} if field.phase is None else {"phase": field.phase}
        return self._stored_item(field, "message", path, role=field.role, content=kept, **phase)

    def _function_call(self, given: Item, path: str) -> Item:
        field: InputFunctionCall = self._convert(given, InputFunctionCall, path)
        item = self._stored_item(
            field,
            "function_call",
            path,
            call_id=field.call_id,
            name=field.name,
            **_optional_namespace(field.namespace),
            arguments=field.arguments,
        )
        try:
            arguments = read_arguments(field.arguments, f"{path}.arguments")
        except InvalidRequest:
            if not self._stored:
                raise
            return item  # the call was cut off, and is left out of the prompt
        self._add_call(field.call_id, prompt_name(field.name, field.namespace), arguments)
        return item

    def _custom_call(self, given: Item, path: str) -> Item:
        field: InputCustomToolCall = self._convert(given, InputCustomToolCall, path)
        self._add_call(field.call_id, prompt_name(field.name, field.namespace), {PARAMETER: field.input})
        return self._stored_item(
            field,
            "custom_tool_call",
            path,
            call_id=field.call_id,
            name=field.name,
            **_optional_namespace(field.namespace),
            input=field.input,
        )

    def _search_call(self, given: Item, path: str) -> Item:
        field: InputToolSearchCall = self._convert(given, InputToolSearchCall, path)
        # Searches that OpenAI executed have no call id.
        self._add_call(field.call_id or "", TOOL_SEARCH, field.arguments)
        return self._stored_item(
            field,
            "tool_search_call",
            path,
            call_id=field.call_id,
            execution=field.execution,
            arguments=field.arguments,
        )

    def _search_output(self, given: Item, path: str) -> Item:
        field: InputToolSearchOutput = self._convert(given, InputToolSearchOutput, path)
        tools, found = self._read_tools(field.tools, f"{path}.tools")
        self.added_tools += [msgspec.structs.replace(each, deferred=False) for each in found]
        names = ", ".join(each.tool.name for each in found)
        self._add_result(field.call_id or "", f"Tools found: {names or 'none'}", path, optional=field.call_id is None)
        return self._stored_item(
            field, "tool_search_output", path, call_id=field.call_id, execution=field.execution, tools=tools
        )

    def _additional_tools(self, given: Item, path: str) -> Item:
        field: InputAdditionalTools = self._convert(given, InputAdditionalTools, path)
        tools, added = self._read_tools(field.tools, f"{path}.tools")
        self.added_tools += added
        return self._stored_item(field, "additional_tools", path, role=field.role, tools=tools)

    def _read_tools(self, given: list[Any], path: str) -> tuple[list[Item], list[ToolDefinition]]:
        """Return tools as they are stored, and the definitions of those that the model can call."""
        reader = ToolDefinitionReader(
            [] if self._stored else self._ignored,
            unsupported="ignore" if self._stored else self._unsupported,
            stored=self._stored,
        )
        try:
            tools = [reader.read(each, f"{path}[{index}]") for index, each in enumerate(given)]
        except RecursionError:
            raise InvalidRequest(f"{path}: a schema is nested too deeply.", param=path) from None
        return [each for each in tools if each is not None], reader.definitions

    def _output(self, given: Item, path: str) -> Item:
        field: InputToolOutput = self._convert(given, InputToolOutput, path)
        reader = ContentPartReader("output", supports_images=False, ignored=self._ignored)
        content, kept = reader.read(field.output, f"{path}.output")
        output = field.output if isinstance(field.output, str) else kept
        item = self._stored_item(field, field.type, path, call_id=field.call_id, output=output)
        self._add_result(field.call_id, content, path)
        return item

    def _add_call(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        self._calls[id] = name
        self.builder.add_call(id, name, arguments)

    def _add_result(self, id: str, content: Content, path: str, *, optional: bool = False) -> None:
        """Add the result of a call. Without the call, it is left out if it is stored or `optional`, else refused."""
        name = self._calls.get(id)
        if name is not None:
            self.builder.add_result(id, name, content)
        elif not self._stored and not optional:
            path += ".call_id"
            raise InvalidRequest(f"{path}: no earlier item is a call with the id {id!r}.", param=path)

    def _reasoning(self, given: Item, path: str) -> Item:
        field: InputReasoning = self._convert(given, InputReasoning, path)
        summary = read_text_parts(field.summary, "summary_text", f"{path}.summary", self._ignored)
        content = read_text_parts(field.content, "reasoning_text", f"{path}.content", self._ignored)
        texts = [each["text"] for each in content or summary]
        encrypted = {}
        if field.encrypted_content is not None:
            encrypted = {"encrypted_content": field.encrypted_content}
            decrypted = decrypt_reasoning(self._context.cipher, field.encrypted_content)
            if decrypted is not None:
                texts = [decrypted]
            elif not self._stored:
                self._ignored.append(f"{path}.encrypted_content")
        if text := "\n".join(texts):
            self.builder.add_reasoning(text)
        visible = {"content": content} if content else {}
        return self._stored_item(field, "reasoning", path, summary=summary, **visible, **encrypted)

    def _compaction(self, given: Item, path: str) -> Item:
        field: InputCompaction = self._convert(given, InputCompaction, path)
        summary = decrypt_summary(self._context.cipher, field.encrypted_content)
        if summary is not None:
            self.builder.add_summary(summary)
        elif not self._stored:
            path += ".encrypted_content"
            raise InvalidRequest(f"{path}: not encrypted by this server for this organization.", param=path)
        return self._stored_item(field, "compaction", path, encrypted_content=field.encrypted_content)

    def _referenced(self, given: Item, path: str) -> Item:
        id = given.get("id")
        found = None
        if isinstance(id, str):
            found = self._items.get(id) or self._context.referenced_items.get(id)
        if found is None:
            raise NotFound(f"{path}.id: no item with the id {id!r}.", param=f"{path}.id")
        if item_type(found) == "item_reference":
            raise InvalidRequest(f"{path}.id: {id!r} is itself a reference.", param=f"{path}.id")
        return found
