"""`input`: items of every kind, checked, given ids, and lowered to the messages of a chat."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import msgspec

from syringa.api.chat.messages import Said, read_arguments
from syringa.api.decoding import convert
from syringa.api.responses.context import Context, Item
from syringa.api.responses.custom_input import PARAMETER
from syringa.api.responses.items import new_id
from syringa.api.responses.messages import Turns
from syringa.api.responses.parts import PartReader, read_texts
from syringa.api.responses.schemas import ITEM_TYPES, LONGEST_ID
from syringa.api.responses.sealing import open_summary, open_thought
from syringa.errors import InvalidRequest, NotFound

_INLINE_ITEMS = 200  # reading more takes milliseconds, in which other requests must not wait
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


class MessageField(msgspec.Struct, kw_only=True):
    role: str
    content: Any = None
    type: str = "message"
    id: str | None = None
    status: ItemStatus = "completed"
    phase: Literal["commentary", "final_answer"] | None = None


class CallField(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus = "completed"


class CustomCallField(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    name: str
    input: str
    id: str | None = None
    status: ItemStatus = "completed"


class OutputField(msgspec.Struct, kw_only=True):
    type: str
    call_id: str
    output: Any = None
    id: str | None = None
    status: ItemStatus = "completed"


class ReasoningField(msgspec.Struct, kw_only=True):
    type: str
    summary: Any = None
    content: Any = None
    encrypted_content: str | None = None
    id: str | None = None
    status: ItemStatus = "completed"


class CompactionField(msgspec.Struct, kw_only=True):
    type: str
    encrypted_content: str
    id: str | None = None
    created_by: str | None = None


class Conversation(msgspec.Struct):
    """What was said, for the template, and the new items of it, for the store."""

    said: list[Said]
    items: list[Item]


def kind_of(given: Any) -> str | None:
    """An item's type. Messages need not say theirs, and an id alone refers to an item."""
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    if kind is None:
        return "message" if "role" in given else "item_reference" if "id" in given else None
    return kind if isinstance(kind, str) else repr(kind)


async def read_input(
    given: Any, context: Context, *, sees_images: bool, ignored: list[str], before: str = "input"
) -> Conversation:
    """The history and the new items. `before` is the field that the history came from."""
    if len(context.history) + (len(given) if isinstance(given, list) else 1) > _INLINE_ITEMS:
        return await asyncio.to_thread(_read, given, context, sees_images, ignored, before)
    return _read(given, context, sees_images, ignored, before)


def _read(given: Any, context: Context, sees_images: bool, ignored: list[str], before: str) -> Conversation:
    reader = _Reader(context, sees_images, ignored)
    for item in context.history:
        reader.read(item, before, stored=True)
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    elif given is not None and not isinstance(given, list):
        raise InvalidRequest("input: expected a string or an array of items.", param="input")
    items = [reader.read(each, f"input[{index}]") for index, each in enumerate(given or [])]
    _refuse_twins(items)
    said = reader.turns.said
    if not said:
        raise InvalidRequest("input: expected a text or at least one item.", param="input")
    return Conversation(said, items)


def _refuse_twins(items: list[Item]) -> None:
    seen = set()
    for index, item in enumerate(items):
        if item["id"] in seen:
            param = f"input[{index}].id"
            raise InvalidRequest(f"{param}: two items have the id {item['id']!r}.", param=param)
        seen.add(item["id"])


class _Reader:
    """Knows the items so far, which later ones may answer or refer to."""

    def __init__(self, context: Context, sees_images: bool, ignored: list[str]) -> None:
        self.turns = Turns()
        self._context, self._sees_images, self._ignored = context, sees_images, ignored
        self._called: dict[str, str] = {}  # each call's tool, by its id
        self._items: dict[str, Item] = {}
        self._stored = False

    def read(self, given: Any, path: str, *, stored: bool = False) -> Item:
        """Adds an item to the conversation, and gives it as it is kept. One that was `stored` was checked before, and
        what has become of the rest since is no fault of this request."""
        self._stored = stored
        if not isinstance(given, dict):
            raise InvalidRequest(f"{path}: expected an object.", param=path)
        match kind_of(given):
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
                served = ", ".join(ITEM_TYPES)
                raise InvalidRequest(f"{path}.type: items are {served} here, not {kind}.", param=f"{path}.type")
        self._items[item["id"]] = item
        return item

    def _convert(self, given: Item, wire: type[Any], path: str) -> Any:
        return convert(given, wire, path=path, ignored=None if self._stored else self._ignored)

    def _named(self, field: Any, kind: str, path: str, **rest: Any) -> Item:
        """The item as it is kept: with its type, an id and a status."""
        id = new_id(_PREFIXES[kind]) if field.id is None else field.id
        if not 0 < len(id) <= LONGEST_ID or not id.isprintable():
            said = f"expected 1 to {LONGEST_ID} printable characters"
            raise InvalidRequest(f"{path}.id: {said}.", param=f"{path}.id")
        status = {} if kind == "compaction" else {"status": field.status}
        return {"type": kind, "id": id, **status, **rest}

    def _message(self, given: Item, path: str) -> Item:
        field: MessageField = self._convert(given, MessageField, path)
        if field.role not in _ROLES:
            raise InvalidRequest(
                f"{path}.role: expected {', '.join(_ROLES)}, not {field.role!r}.", param=f"{path}.role"
            )
        reader = PartReader(field.role, sees_images=self._sees_images, ignored=self._ignored)
        content, kept = reader.read(field.content, f"{path}.content")
        if field.role == "assistant":
            self.turns.answer(content)
        else:
            self.turns.say(field.role, content, reader.images)
        if field.phase is not None and field.role != "assistant":
            raise InvalidRequest(f"{path}.phase: only the assistant's messages have one.", param=f"{path}.phase")
        phase = {} if field.phase is None else {"phase": field.phase}
        return self._named(field, "message", path, role=field.role, content=kept, **phase)

    def _function_call(self, given: Item, path: str) -> Item:
        field: CallField = self._convert(given, CallField, path)
        item = self._named(
            field, "function_call", path, call_id=field.call_id, name=field.name, arguments=field.arguments
        )
        try:
            arguments = read_arguments(field.arguments, f"{path}.arguments")
        except InvalidRequest:
            if not self._stored:
                raise
            return item  # it was cut short, and nobody could answer it
        self._called[field.call_id] = field.name
        self.turns.call(field.call_id, field.name, arguments)
        return item

    def _custom_call(self, given: Item, path: str) -> Item:
        field: CustomCallField = self._convert(given, CustomCallField, path)
        self._called[field.call_id] = field.name
        self.turns.call(field.call_id, field.name, {PARAMETER: field.input})
        return self._named(field, "custom_tool_call", path, call_id=field.call_id, name=field.name, input=field.input)

    def _output(self, given: Item, path: str) -> Item:
        field: OutputField = self._convert(given, OutputField, path)
        reader = PartReader("output", sees_images=False, ignored=self._ignored)
        content, kept = reader.read(field.output, f"{path}.output")
        output = field.output if isinstance(field.output, str) else kept
        item = self._named(field, field.type, path, call_id=field.call_id, output=output)
        name = self._called.get(field.call_id)
        if name is not None:
            self.turns.result(field.call_id, name, content)
        elif not self._stored:
            path += ".call_id"
            raise InvalidRequest(f"{path}: no item before it is a call {field.call_id!r}.", param=path)
        return item

    def _reasoning(self, given: Item, path: str) -> Item:
        field: ReasoningField = self._convert(given, ReasoningField, path)
        summary = read_texts(field.summary, "summary_text", f"{path}.summary", self._ignored)
        content = read_texts(field.content, "reasoning_text", f"{path}.content", self._ignored)
        texts = [each["text"] for each in content or summary]
        sealed = {}
        if field.encrypted_content is not None:
            sealed = {"encrypted_content": field.encrypted_content}
            thought = open_thought(self._context.seal, field.encrypted_content)
            if thought is not None:
                texts = [thought]
            elif not self._stored:
                self._ignored.append(f"{path}.encrypted_content")
        if text := "\n".join(texts):
            self.turns.think(text)
        shown = {"content": content} if content else {}
        return self._named(field, "reasoning", path, summary=summary, **shown, **sealed)

    def _compaction(self, given: Item, path: str) -> Item:
        field: CompactionField = self._convert(given, CompactionField, path)
        summary = open_summary(self._context.seal, field.encrypted_content)
        if summary is not None:
            self.turns.summarize(summary)
        elif not self._stored:
            path += ".encrypted_content"
            raise InvalidRequest(f"{path}: it was not made by this server.", param=path)
        return self._named(field, "compaction", path, encrypted_content=field.encrypted_content)

    def _referenced(self, given: Item, path: str) -> Item:
        id = given.get("id")
        found = None
        if isinstance(id, str):
            found = self._items.get(id) or self._context.found.get(id)
        if found is None:
            raise NotFound(f"{path}.id: there is no item {id!r}.", param=f"{path}.id")
        if kind_of(found) == "item_reference":
            raise InvalidRequest(f"{path}.id: {id!r} is a reference itself.", param=f"{path}.id")
        return found
