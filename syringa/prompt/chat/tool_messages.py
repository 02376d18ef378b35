"""Adaptation of tool calls in a conversation to the model's chat template.

A template with tools may restrict the ids of calls. For a template without tools, calls and their results become text:
the tools are described in the instructions, calls are rewritten in the plain format, and results are user messages.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from syringa.output_formats import TOOL_CALL_BEGIN, TOOL_CALL_END, ToolCallFormat
from syringa.prompt.chat.template import Message
from syringa.prompt.chat.tools import ToolUse, tools_preamble

_INSTRUCTION_ROLES = ("system", "developer")
_MISTRAL_ID = re.compile("[a-zA-Z0-9]{9}")


def rewrite_tool_call_ids(format: ToolCallFormat, messages: Sequence[Message]) -> list[Message]:
    """Return the messages with call ids in the form of the model family.

    Mistral's templates reject other forms, and Kimi writes the form that it reads.
    """
    if format not in ("mistral", "mistral-args", "kimi"):
        return list(messages)
    renamed: dict[str, str] = {}
    result = []
    calls = 0
    for message in messages:
        if message.get("tool_calls"):
            changed = []
            for call in message["tool_calls"]:
                name = call["function"]["name"]
                renamed[call["id"]] = f"functions.{name}:{calls}" if format == "kimi" else _mistral_id(call["id"])
                changed.append({**call, "id": renamed[call["id"]]})
                calls += 1
            message = {**message, "tool_calls": changed}
        elif "tool_call_id" in message:
            message = {**message, "tool_call_id": renamed.get(message["tool_call_id"], message["tool_call_id"])}
        result.append(message)
    return result


def _mistral_id(id: str) -> str:
    return id if _MISTRAL_ID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]


def tool_calls_as_text(messages: Iterable[Message]) -> list[Message]:
    """Return the conversation with calls and results as text.

    Consecutive results, and the user message after them, become one message: many templates require user and assistant
    messages to alternate.
    """
    rewritten: list[Message] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        elif message.get("tool_calls"):
            message = _calls_to_text(message)
        if after_result and message["role"] == "user":
            rewritten[-1] = {**message, "content": _prepend(f"{rewritten[-1]['content']}\n", message["content"])}
        else:
            rewritten.append(message)
        after_result = is_result
    return rewritten


def add_tool_instructions(
    messages: Sequence[Message], use: ToolUse, *, supports_system: bool, short: bool = False
) -> list[Message]:
    """Return the messages with a description of the tools and examples of their use.

    The description goes into the first instructions, or into the first user message if the template supports none.
    The examples are messages before the conversation: models without training on tools follow examples better than
    instructions.
    """
    description = tools_preamble(use, short=short)
    start = next((i for i, each in enumerate(messages) if each["role"] not in _INSTRUCTION_ROLES), len(messages))
    messages = [*messages[:start], *_examples(use), *messages[start:]]
    roles = _INSTRUCTION_ROLES if supports_system else ("user",)
    at = 0 if supports_system else next(i for i, each in enumerate(messages) if each["role"] == "user")
    if messages[at]["role"] not in roles:
        return [{"role": roles[0], "content": description.rstrip()}, *messages]
    messages[at] = {**messages[at], "content": _prepend(description, messages[at]["content"])}
    return messages


def _examples(use: ToolUse) -> list[Message]:
    """Return example messages: text where no function helps, calls where one does, the last to an actual function."""
    turns = [
        ("Who wrote Faust?", "Goethe wrote Faust."),
        ("What is 3 times 4?", _call_text("multiply", {"a": 3, "b": 4})),
        ("Thank you!", "You are welcome."),
    ]
    tool = use.tools[0]
    question = (tool.description or tool.name.replace("_", " ")).partition("\n")[0].strip()
    turns.append((question, _call_text(tool.name, _sample_arguments(tool.parameters or {}))))
    return [
        {"role": role, "content": text}
        for turn in turns
        for role, text in zip(("user", "assistant"), turn, strict=True)
    ]


def _sample_arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a value for each required parameter, of the right type where the schema states it directly."""
    properties = schema.get("properties")
    required = schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    return {name: _sample_value(properties.get(name)) for name in required if isinstance(name, str)}


def _sample_value(schema: Any) -> Any:
    known = schema if isinstance(schema, dict) else {}
    if isinstance(known.get("enum"), list) and known["enum"]:
        return known["enum"][0]
    kinds: dict[str, Any] = {"integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None}
    kind = known.get("type")
    return kinds.get(kind, "example") if isinstance(kind, str) else "example"


def _call_text(name: str, arguments: Any) -> str:
    return TOOL_CALL_BEGIN + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + TOOL_CALL_END


def _calls_to_text(message: Message) -> Message:
    functions = [call["function"] for call in message["tool_calls"]]
    calls = [_call_text(each["name"], each["arguments"]) for each in functions]
    text = message["content"]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join([text, *calls] if text else calls)}


def _prepend(text: str, content: Any) -> Any:
    """Return a message's content with a text before it."""
    return [{"type": "text", "text": text}, *content] if isinstance(content, list) else text + content
