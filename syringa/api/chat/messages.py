"""The `messages` field: validation, and conversion to the messages that chat templates render."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.chat.content import ASSISTANT_CONTENT, TEXT_CONTENT, USER_CONTENT, ContentReader
from syringa.api.decoding import convert
from syringa.api.fields.schema import object_schema
from syringa.errors import InvalidRequest
from syringa.prompt.chat.isolated_template import IsolatedTemplate
from syringa.prompt.chat.template import Message, Template
from syringa.prompt.images.loader import ImageSource

_ROLE = re.compile("[A-Za-z][A-Za-z0-9_.-]{0,63}")
_INLINE_MESSAGES = 200  # more take milliseconds, and are read in a thread
_TEXT = {"type": ["string", "null"]}
_CALL = object_schema(
    ("id", "type", "function"),
    id={"type": "string"},
    type={"const": "function"},
    function=object_schema(
        ("name", "arguments"),
        name={"type": "string"},
        arguments={"type": "string", "description": "A JSON object, as text."},
    ),
)
_MESSAGE_SCHEMA = {
    "anyOf": [
        object_schema(("role", "content"), role={"enum": ["system", "developer"]}, content=TEXT_CONTENT, name=_TEXT),
        object_schema(("role", "content"), role={"const": "user"}, content=USER_CONTENT, name=_TEXT),
        object_schema(
            ("role",),
            role={"const": "assistant"},
            content=ASSISTANT_CONTENT,
            name=_TEXT,
            refusal=_TEXT,
            annotations={"type": ["array", "null"], "description": "Reported as ignored unless empty."},
            reasoning=_TEXT,
            reasoning_content=_TEXT,
            tool_calls={"type": ["array", "null"], "items": _CALL},
            audio={"type": "null"},
            function_call={"type": "null"},
        ),
        object_schema(
            ("role", "content", "tool_call_id"),
            role={"const": "tool"},
            content=TEXT_CONTENT,
            tool_call_id={"type": "string", "description": "Id of the call that this message answers."},
            name=_TEXT,
        ),
        object_schema(
            ("role", "content"),
            role={
                "type": "string",
                "pattern": f"^{_ROLE.pattern}$",
                "not": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
                "description": "Another role that the model's chat template renders.",
            },
            content=TEXT_CONTENT,
            name=_TEXT,
        ),
    ]
}
MessagesField = Annotated[list[Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE_SCHEMA)]], Meta(min_length=1)]


class RoleField(msgspec.Struct, kw_only=True):
    role: str


class PlainMessageField(msgspec.Struct, kw_only=True):
    """A system, developer or user message, or one of a role of the model's own."""

    role: str
    content: Any = None
    name: str | None = None


class AssistantMessageField(msgspec.Struct, kw_only=True):
    role: str
    content: Any = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    audio: Any = None
    function_call: Any = None


class ToolMessageField(msgspec.Struct, kw_only=True):
    role: str
    tool_call_id: str
    content: Any = None
    name: str | None = None


class ToolCallField(msgspec.Struct, kw_only=True):
    id: str
    type: str
    function: Any = None


class FunctionCallField(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class PromptMessage(msgspec.Struct):
    """A message for the chat template, and its images."""

    message: Message
    images: list[ImageSource] = []


async def read_messages(
    given: Any, *, supports_images: bool, ignored: list[str], template: Template | None = None
) -> list[PromptMessage]:
    """Validate the messages. Raises `InvalidRequest`; the paths of unknown fields are appended to `ignored`.

    Beside the roles of OpenAI's API, those that `template` renders are accepted.
    """
    read = functools.partial(_read, given, supports_images, ignored, template)
    if isinstance(template, IsolatedTemplate):
        return await template.run(read)
    if isinstance(given, list) and _size(given) > _INLINE_MESSAGES:
        return await asyncio.to_thread(read)
    return read()


def _size(given: list[Any]) -> int:
    """Return the number of messages and content parts, or any number above the limit if there are more."""
    size = len(given)
    for message in given[:_INLINE_MESSAGES]:
        content = message.get("content") if isinstance(message, dict) else None
        size += len(content) if isinstance(content, list) else 0
    return size


def _read(given: Any, supports_images: bool, ignored: list[str], template: Template | None) -> list[PromptMessage]:
    if not isinstance(given, list) or not given:
        raise InvalidRequest("messages: expected at least one message.", param="messages")
    reader = _Reader(supports_images, ignored, template)
    return [reader.read(each, f"messages[{index}]") for index, each in enumerate(given)]


class _Reader:
    """Reads messages in order, and remembers the tool calls that later ones may answer."""

    def __init__(self, supports_images: bool, ignored: list[str], template: Template | None) -> None:
        self._supports_images, self._ignored, self._template = supports_images, ignored, template
        self._calls: dict[str, str] = {}  # function name by call id

    def read(self, given: Any, path: str) -> PromptMessage:
        role = convert(given, RoleField, path=path).role
        contents = ContentReader(supports_images=self._supports_images, ignored=self._ignored)
        match role:
            case "system" | "developer" | "user":
                message = self._plain(given, path, contents)
            case "assistant":
                message = self._assistant(given, path, contents)
            case "tool":
                message = self._tool(given, path, contents)
            case _ if self._is_own_role(role):
                message = self._plain(given, path, contents)
            case _:
                hint = "; send the results of functions in messages of role tool" if role == "function" else ""
                raise InvalidRequest(
                    f"{path}.role: expected system, developer, user, assistant, tool or a role of the model's chat"
                    f" template, not {role!r}{hint}.",
                    param=f"{path}.role",
                )
        return PromptMessage(message, contents.images)

    def _is_own_role(self, role: str) -> bool:
        """Return whether the template has a role that OpenAI's API does not have."""
        if self._template is None or role == "function" or not _ROLE.fullmatch(role):
            return False
        return self._template.supports_role(role)

    def _plain(self, given: Any, path: str, contents: ContentReader) -> Message:
        field = convert(given, PlainMessageField, path=path, ignored=self._ignored)
        content = contents.read(field.content, f"{path}.content", field.role)
        return _with_name({"role": field.role, "content": content}, field.name)

    def _tool(self, given: Any, path: str, contents: ContentReader) -> Message:
        field = convert(given, ToolMessageField, path=path, ignored=self._ignored)
        if field.tool_call_id not in self._calls:
            path += ".tool_call_id"
            raise InvalidRequest(f"{path}: no earlier message has a call {field.tool_call_id!r}.", param=path)
        content = contents.read(field.content, f"{path}.content", "tool")
        # Some templates name the function beside its result.
        name = field.name or self._calls[field.tool_call_id]
        return {"role": "tool", "content": content, "tool_call_id": field.tool_call_id, "name": name}

    def _assistant(self, given: Any, path: str, contents: ContentReader) -> Message:
        field = convert(given, AssistantMessageField, path=path, ignored=self._ignored)
        _reject_unsupported(field, path)
        if field.annotations:  # those of this server's own messages are empty
            self._ignored.append(f"{path}.annotations")
        reasoning = field.reasoning if field.reasoning is not None else field.reasoning_content
        content = field.content if field.content is not None else field.refusal
        if content is None and not field.tool_calls and reasoning is None:
            path += ".content"
            raise InvalidRequest(f"{path}: expected a text; it may be absent only with tool_calls.", param=path)
        if content is not None:
            content = contents.read(content, f"{path}.content", "assistant")
        elif not field.tool_calls:
            content = ""
        message = _with_name({"role": "assistant", "content": content}, field.name)
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if field.tool_calls:
            calls = enumerate(field.tool_calls)
            message["tool_calls"] = [self._call(call, f"{path}.tool_calls[{index}]") for index, call in calls]
        return message

    def _call(self, given: Any, path: str) -> dict[str, Any]:
        shape = convert(given, ToolCallField, path=path, ignored=self._ignored)
        if shape.type != "function":
            path += ".type"
            raise InvalidRequest(f"{path}: only calls of type function are supported, not {shape.type!r}.", param=path)
        path += ".function"
        called = convert(shape.function, FunctionCallField, path=path, ignored=self._ignored)
        self._calls[shape.id] = called.name
        arguments = read_arguments(called.arguments, f"{path}.arguments")
        return {"id": shape.id, "type": "function", "function": {"name": called.name, "arguments": arguments}}


def read_arguments(text: str, path: str) -> dict[str, Any]:
    """Parse the arguments of a call, which have to be a JSON object; an empty text is an empty object."""
    try:
        found = json.loads(text) if text.strip() else {}
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"{path}: not valid JSON: {error}.", param=path) from None
    except (ValueError, RecursionError):
        raise InvalidRequest(
            f"{path}: JSON with a number that is too long, or nested too deeply.", param=path
        ) from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path}: expected a JSON object.", param=path)
    return found


def _reject_unsupported(field: AssistantMessageField, path: str) -> None:
    if field.audio is not None:
        raise InvalidRequest(f"{path}.audio: audio is not supported.", param=f"{path}.audio")
    if field.function_call is not None:
        path += ".function_call"
        raise InvalidRequest(f"{path}: deprecated and not supported; send the call in tool_calls.", param=path)


def _with_name(message: Message, name: str | None) -> Message:
    return message if name is None else {**message, "name": name}
