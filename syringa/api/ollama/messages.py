"""The `messages` of Ollama's API, converted to those of chat completions."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from syringa.api.decoding import convert
from syringa.api.fields.schema import object_schema
from syringa.errors import InvalidRequest

_INLINE_MESSAGES = 256
_TEXT = {"type": ["string", "null"]}
_CALL = object_schema(
    ("function",),
    id=_TEXT,
    function=object_schema(
        ("name",),
        index={"type": ["integer", "null"]},
        name={"type": "string"},
        arguments={"type": ["object", "null"]},
    ),
)
_MESSAGE = object_schema(
    ("role",),
    role={"type": "string", "description": "`system`, `user`, `assistant`, `tool`, or a role of the model's own."},
    content=_TEXT,
    thinking=_TEXT,
    images={"type": ["array", "null"], "items": {"type": "string", "description": "An image file in base64."}},
    tool_calls={"type": ["array", "null"], "items": _CALL},
    tool_name=_TEXT,
    tool_call_id=_TEXT,
    name=_TEXT,
)
OllamaMessagesField = list[Annotated[dict[str, Any], Meta(extra_json_schema=_MESSAGE)]] | None
ImagesField = list[str] | None


class OllamaMessageField(msgspec.Struct, kw_only=True):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class OllamaCallField(msgspec.Struct, kw_only=True):
    function: Any
    id: str | None = None
    type: str | None = None


class OllamaFunctionField(msgspec.Struct, kw_only=True):
    name: str
    arguments: Any = None
    index: int | None = None


async def read_chat_messages(given: list[Any], ignored: list[str]) -> list[dict[str, Any]]:
    """Like `to_chat_messages`, in a thread if there are many, so that other requests do not wait."""
    if len(given) <= _INLINE_MESSAGES:
        return to_chat_messages(given, ignored)
    return await asyncio.to_thread(to_chat_messages, given, ignored)


def to_chat_messages(given: list[Any], ignored: list[str]) -> list[dict[str, Any]]:
    """Return the messages in OpenAI's shape. The paths of unknown fields are appended to `ignored`.

    Raises `InvalidRequest`.

    Calls and their results need not have ids in Ollama's API: a result answers the first call without one, of its name
    if it has one.
    """
    converter = _Converter(ignored)
    return [converter.message(each, f"messages[{index}]") for index, each in enumerate(given)]


def user_message(text: str, images: list[str] | None, path: str = "images") -> dict[str, Any]:
    """Return a message of the user with a text and images in base64."""
    if not images:
        return {"role": "user", "content": text}
    parts = [_image_part(image, f"{path}[{index}]") for index, image in enumerate(images)]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts] if text else parts}


def image_names(messages: list[dict[str, Any]], *, single: bool = False) -> dict[str, str]:
    """Return the names that images in converted messages have in Ollama's API, by their paths in OpenAI's.

    `single`: they are a field of the request, not of a message.
    """
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        parts = message["content"] if isinstance(message["content"], list) else []
        images = [number for number, part in enumerate(parts) if part["type"] == "image_url"]
        for position, number in enumerate(images):
            name = f"images[{position}]" if single else f"messages[{index}].images[{position}]"
            path = f"messages[{index}].content[{number}]"
            names |= dict.fromkeys((f"{path}.image_url.url", f"{path}.image_url", path), name)
    return names


def _image_part(data: str, path: str) -> dict[str, Any]:
    if data.startswith(("http://", "https://")):
        raise InvalidRequest(f"{path}: expected an image in base64, not a URL.", param=path)
    # The format of the image is found in its data.
    url = data if data.startswith("data:") else f"data:image/png;base64,{data}"
    return {"type": "image_url", "image_url": {"url": url}}


class _Converter:
    def __init__(self, ignored: list[str]) -> None:
        self._ignored = ignored
        self._known: set[str] = set()  # ids of all calls
        self._unanswered: set[str] = set()
        # Ids of calls in their order, by the name of the function and, under None, of all. Answered ones are taken out
        # when they become the first.
        self._calls: defaultdict[str | None, deque[str]] = defaultdict(deque)
        self._generated_ids = 0

    def message(self, given: Any, path: str) -> dict[str, Any]:
        field = convert(given, OllamaMessageField, path=path, ignored=self._ignored)
        role, text = field.role.lower(), field.content or ""
        self._check_fields(field, role, path)
        if role == "tool":
            return self._result(field, text, path)
        message: dict[str, Any] = {"role": role, "content": text}
        if field.images:
            message = user_message(text, field.images, f"{path}.images")
        if field.name:
            message["name"] = field.name
        if field.thinking:
            message["reasoning_content"] = field.thinking
        if field.tool_calls:
            calls = enumerate(field.tool_calls)
            message["tool_calls"] = [self._call(call, f"{path}.tool_calls[{index}]") for index, call in calls]
        return message

    def _check_fields(self, field: OllamaMessageField, role: str, path: str) -> None:
        """Refuse content that a message of the role cannot have, and report names that have no effect in it."""
        for name, owner in (("images", "user"), ("tool_calls", "assistant"), ("thinking", "assistant")):
            if getattr(field, name) and role != owner:
                where = f"{path}.{name}"
                raise InvalidRequest(f"{where}: not possible in a message of the role {role}.", param=where)
        if role != "tool":
            self._ignored += [f"{path}.{name}" for name in ("tool_name", "tool_call_id") if getattr(field, name)]

    def _call(self, given: Any, path: str) -> dict[str, Any]:
        call = convert(given, OllamaCallField, path=path, ignored=self._ignored)
        function = convert(call.function, OllamaFunctionField, path=f"{path}.function", ignored=self._ignored)
        arguments = {} if function.arguments is None else function.arguments
        if not isinstance(arguments, dict | str):
            path += ".function.arguments"
            raise InvalidRequest(f"{path}: expected an object.", param=path)
        id = call.id or self._new_id()
        self._known.add(id)
        self._unanswered.add(id)
        for name in (None, function.name):
            self._calls[name].append(id)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {"id": id, "type": "function", "function": {"name": function.name, "arguments": text}}

    def _result(self, field: OllamaMessageField, text: str, path: str) -> dict[str, Any]:
        id, name = field.tool_call_id, field.tool_name or field.name
        if id not in self._known:
            id = self._first_unanswered(name)
        if id is None:
            raise InvalidRequest(f"{path}: no earlier message has a call that this could answer.", param=path)
        self._unanswered.discard(id)
        return {"role": "tool", "tool_call_id": id, "content": text} | ({"name": name} if name else {})

    def _new_id(self) -> str:
        while (id := f"call_{self._generated_ids}") in self._known:
            self._generated_ids += 1
        return id

    def _first_unanswered(self, name: str | None) -> str | None:
        calls = self._calls.get(name or None, deque())
        while calls and calls[0] not in self._unanswered:
            calls.popleft()
        return calls[0] if calls else None
