"""The `input` field: validation of its items, and their conversion to chat messages."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from syringa.api.chat.messages import PromptMessage, read_arguments
from syringa.api.decoding import convert
from syringa.api.responses.content_parts import ContentPartReader, read_text_parts
from syringa.api.responses.context import Item, ResponseContext, decrypt_reasoning, decrypt_summary
from syringa.api.responses.custom_input import PARAMETER
from syringa.api.responses.items import new_id
from syringa.api.responses.message_builder import MessageBuilder
from syringa.api.responses.schemas import ITEM_TYPES, MAX_ID_LENGTH
from syringa.errors import InvalidRequest, NotFound

_INLINE_ITEMS = 200  # more take milliseconds, and are read in a thread
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}
_ROLES = ("user", "system", "developer", "assistant")
ItemStatus = Literal["in_progress", "completed", "incomplete"]


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
    id: str | None = None
    status: ItemStatus = "completed"


class InputCustomToolCall(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: ItemStatus = "completed"


class InputToolOutput(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    output: Any = None
    id: str | None = None
    status: ItemStatus = "completed"


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
    """The whole conversation as chat messages, and the new items as they are stored."""

    messages: list[PromptMessage]
    items: list[Item]


def item_type(given: Any) -> str | None:
    """Return the type of an item. It may be absent in a message, and in a reference, which has an id only."""
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    if kind is None:
        return "message" if "role" in given else "item_reference" if "id" in given else None
    return kind if isinstance(kind, str) else repr(kind)


async def read_input(
    given: Any, context: ResponseContext, *, supports_images: bool, ignored: list[str], history_field: str = "input"
) -> ParsedInput:
    """Read the history and the new items. Raises `InvalidRequest` or `NotFound`.

    `history_field` is the request field that the history came from.
    """
    if len(context.history) + (len(given) if isinstance(given, list) else 1) > _INLINE_ITEMS:
        return await asyncio.to_thread(_read, given, context, supports_images, ignored, history_field)
    return _read(given, context, supports_images, ignored, history_field)


def _read(
    given: Any, context: ResponseContext, supports_images: bool, ignored: list[str], history_field: str
) -> ParsedInput:
    reader = _Reader(context, supports_images, ignored)
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
    return ParsedInput(messages, items)


def _reject_duplicate_ids(items: list[Item]) -> None:
    seen = set()
    for index, item in enumerate(items):
        if item["id"] in seen:
            param = f"input[{index}].id"
            raise InvalidRequest(f"{param}: duplicate item id {item['id']!r}.", param=param)
        seen.add(item["id"])


class _Reader:
    """Reads items in order, and remembers those that later ones may answer or refer to."""

    def __init__(self, context: ResponseContext, supports_images: bool, ignored: list[str]) -> None:
        self.builder = MessageBuilder()
        self._context, self._supports_images, self._ignored = context, supports_images, ignored
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
        status = {} if kind == "compaction" else {"status": field.status}
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
            field, "function_call", path, call_id=field.call_id, name=field.name, arguments=field.arguments
        )
        try:
            arguments = read_arguments(field.arguments, f"{path}.arguments")
        except InvalidRequest:
            if not self._stored:
                raise
            return item  # the call was cut off, and is left out of the prompt
        self._calls[field.call_id] = field.name
        self.builder.add_call(field.call_id, field.name, arguments)
        return item

    def _custom_call(self, given: Item, path: str) -> Item:
        field: InputCustomToolCall = self._convert(given, InputCustomToolCall, path)
        self._calls[field.call_id] = field.name
        self.builder.add_call(field.call_id, field.name, {PARAMETER: field.input})
        return self._stored_item(
            field, "custom_tool_call", path, call_id=field.call_id, name=field.name, input=field.input
        )

    def _output(self, given: Item, path: str) -> Item:
        field: InputToolOutput = self._convert(given, InputToolOutput, path)
        reader = ContentPartReader("output", supports_images=False, ignored=self._ignored)
        content, kept = reader.read(field.output, f"{path}.output")
        output = field.output if isinstance(field.output, str) else kept
        item = self._stored_item(field, field.type, path, call_id=field.call_id, output=output)
        name = self._calls.get(field.call_id)
        if name is not None:
            self.builder.add_result(field.call_id, name, content)
        elif not self._stored:
            path += ".call_id"
            raise InvalidRequest(f"{path}: no earlier item is a call with the id {field.call_id!r}.", param=path)
        return item

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
