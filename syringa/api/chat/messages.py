"""`messages`: what a client sends of a conversation, as chat templates take it, and the images in it."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.chat.content import ASSISTANT_CONTENT, TEXT_CONTENT, USER_CONTENT, ContentReader
from syringa.api.decoding import convert
from syringa.api.fields.annotations import record
from syringa.errors import InvalidRequest
from syringa.prompt.chat.template import Message
from syringa.prompt.images.images import ImageSource

_INLINE_MESSAGES = 200  # reading more takes milliseconds, in which other requests must not wait
_TEXT = {"type": ["string", "null"]}
_CALL = record(
    ("id", "type", "function"),
    id={"type": "string"},
    type={"const": "function"},
    function=record(
        ("name", "arguments"),
        name={"type": "string"},
        arguments={"type": "string", "description": "The JSON text of an object."},
    ),
)
_MESSAGE_SCHEMA = {
    "anyOf": [
        record(("role", "content"), role={"enum": ["system", "developer"]}, content=TEXT_CONTENT, name=_TEXT),
        record(("role", "content"), role={"const": "user"}, content=USER_CONTENT, name=_TEXT),
        record(
            ("role",),
            role={"const": "assistant"},
            content=ASSISTANT_CONTENT,
            name=_TEXT,
            refusal=_TEXT,
            reasoning=_TEXT,
            reasoning_content=_TEXT,
            tool_calls={"type": ["array", "null"], "items": _CALL},
            audio={"type": "null"},
            function_call={"type": "null"},
        ),
        record(
            ("role", "content", "tool_call_id"),
            role={"const": "tool"},
            content=TEXT_CONTENT,
            tool_call_id={"type": "string", "description": "The id of the call that it answers."},
            name=_TEXT,
        ),
    ]
}
MessagesField = Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE_SCHEMA)]], Meta(min_length=1)]


class RoleField(msgspec.Struct, kw_only=True):
    role: str


class SpokenField(msgspec.Struct, kw_only=True):
    """A message of the system, the developer or the user."""

    role: str
    content: Any = None
    name: str | None = None


class AssistantField(msgspec.Struct, kw_only=True):
    role: str
    content: Any = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class ToolField(msgspec.Struct, kw_only=True):
    role: str
    tool_call_id: str
    content: Any = None
    name: str | None = None


class CallField(msgspec.Struct, kw_only=True):
    id: str
    type: str
    function: Any = None


class CalledField(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class Said(msgspec.Struct):
    """A message for the template, and the images that it shows."""

    message: Message
    images: list[ImageSource] = []


async def read_messages(given: Any, *, sees_images: bool, ignored: list[str]) -> list[Said]:
    """Checks every message. What is not known in one is added to `ignored` by its path."""
    if isinstance(given, list) and _size(given) > _INLINE_MESSAGES:
        return await asyncio.to_thread(_read, given, sees_images, ignored)
    return _read(given, sees_images, ignored)


def _size(given: list[Any]) -> int:
    """Messages and their parts; counting stops where it is plain that there are many."""
    size = len(given)
    for message in given[:_INLINE_MESSAGES]:
        content = message.get("content") if isinstance(message, dict) else None
        size += len(content) if isinstance(content, list) else 0
    return size


def _read(given: Any, sees_images: bool, ignored: list[str]) -> list[Said]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages: expected at least one message.", param="messages")
    reader = _Reader(sees_images, ignored)
    return [reader.read(each, f"messages[{index}]") for index, each in enumerate(given)]


class _Reader:
    """Knows the calls of the messages so far, which later ones may answer."""

    def __init__(self, sees_images: bool, ignored: list[str]) -> None:
        self._sees_images, self._ignored = sees_images, ignored
        self._called: dict[str, str] = {}  # each call's function, by its id

    def read(self, given: Any, path: str) -> Said:
        role = convert(given, RoleField, path=path).role
        contents = ContentReader(sees_images=self._sees_images, ignored=self._ignored)
        match role:
            case "system" | "developer" | "user":
                message = self._spoken(given, path, contents)
            case "assistant":
                message = self._assistant(given, path, contents)
            case "tool":
                message = self._tool(given, path, contents)
            case _:
                hint = "; the results of functions go into messages of the role tool" * (role == "function")
                raise InvalidRequest(
                    f"{path}.role: expected system, developer, user, assistant or tool, not {role!r}{hint}.",
                    param=f"{path}.role",
                )
        return Said(message, contents.images)

    def _spoken(self, given: Any, path: str, contents: ContentReader) -> Message:
        field = convert(given, SpokenField, path=path, ignored=self._ignored)
        content = contents.read(field.content, f"{path}.content", field.role)
        return _named({"role": field.role, "content": content}, field.name)

    def _tool(self, given: Any, path: str, contents: ContentReader) -> Message:
        field = convert(given, ToolField, path=path, ignored=self._ignored)
        if field.tool_call_id not in self._called:
            path += ".tool_call_id"
            raise InvalidRequest(f"{path}: no earlier message has a call {field.tool_call_id!r}.", param=path)
        content = contents.read(field.content, f"{path}.content", "tool")
        # Some templates name the function beside its result.
        name = field.name or self._called[field.tool_call_id]
        return {"role": "tool", "content": content, "tool_call_id": field.tool_call_id, "name": name}

    def _assistant(self, given: Any, path: str, contents: ContentReader) -> Message:
        field = convert(given, AssistantField, path=path, ignored=self._ignored)
        _refuse_old(field, path)
        reasoning = field.reasoning if field.reasoning is not None else field.reasoning_content
        content = field.content if field.content is not None else field.refusal
        if content is None and not field.tool_calls and reasoning is None:
            path += ".content"
            raise InvalidRequest(f"{path}: expected a text, or tool_calls beside it.", param=path)
        if content is not None:
            content = contents.read(content, f"{path}.content", "assistant")
        elif not field.tool_calls:
            content = ""
        message = _named({"role": "assistant", "content": content}, field.name)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if field.tool_calls:
            calls = enumerate(field.tool_calls)
            message["tool_calls"] = [self._call(call, f"{path}.tool_calls[{index}]") for index, call in calls]
        return message

    def _call(self, given: Any, path: str) -> dict[str, Any]:
        shape = convert(given, CallField, path=path, ignored=self._ignored)
        if shape.type != "function":
            path += ".type"
            raise InvalidRequest(f"{path}: only functions can be called here, not {shape.type!r}.", param=path)
        path += ".function"
        called = convert(shape.function, CalledField, path=path, ignored=self._ignored)
        self._called[shape.id] = called.name
        arguments = read_arguments(called.arguments, f"{path}.arguments")
        return {"id": shape.id, "type": "function", "function": {"name": called.name, "arguments": arguments}}


def read_arguments(text: str, path: str) -> dict[str, Any]:
    """The object that templates write out in their own way. A call without arguments may have none at all."""
    try:
        found = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{path}: not valid JSON: {error}.", param=path) from None
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{path}: JSON with a number too long, or nested too deeply.", param=path) from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path}: expected the JSON text of an object.", param=path)
    return found


def _refuse_old(field: AssistantField, path: str) -> None:
    if field.audio is not None:
        raise InvalidRequest(f"{path}.audio: audio is not served here.", param=f"{path}.audio")
    if field.function_call is not None:
        path += ".function_call"
        raise InvalidRequest(f"{path}: OpenAI has replaced it; send the call in tool_calls.", param=path)


def _named(message: Message, name: str | None) -> Message:
    return message if name is None else {**message, "name": name}
